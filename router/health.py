"""Whether this router can serve, told to the health service as soon as it changes."""

from __future__ import annotations

from router.entrance import Entrance
from router.registry import Registry
from router.workers import Workers
from tandem.rpc.server import RpcServer


class Health:
    """Ready = a usable pair of workers stands, and the router does not drain."""

    def __init__(self, workers: Workers, registry: Registry, entrance: Entrance) -> None:
        self._workers = workers
        self._registry = registry
        self._entrance = entrance

    def obstacle(self) -> str | None:
        """What keeps this router from serving, for people; None = nothing."""
        if self._entrance.draining:
            return "the router is draining"
        return self._workers.readiness()

    async def run(self, server: RpcServer) -> None:
        """Ticks the registry and announces changes, until cancelled."""
        while True:
            self._registry.tick()
            server.set_serving(self.obstacle() is None)
            await self._workers.wait_for_change(self._registry.tick_s)
