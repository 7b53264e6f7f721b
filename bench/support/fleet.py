"""Routers and workers as single processes, each started and stopped by itself, as pods are."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass

from bench.support.cluster import Cluster, eventually, run_command
from tandem.client import Client
from tandem.types import Role

JOIN_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class Exit:
    """How a process left."""

    name: str
    code: int
    seconds: float
    """From SIGTERM to the end."""


class Fleet:
    """Every process of one cluster by name. Use as a context manager: leaving it ends them all."""

    def __init__(self, router_ports: tuple[int, ...], model: str = "demo", options: tuple[str, ...] = ()) -> None:
        """Routers are started on `router_ports` by `start_router`; `options` are for all workers."""
        self._routers = tuple(f"127.0.0.1:{port}" for port in router_ports)
        self._model = model
        self._options = options
        self._stacks: dict[str, contextlib.ExitStack] = {}
        self._processes: dict[str, Cluster] = {}

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, *exception: object) -> None:
        for name in list(self._stacks):
            self._stacks.pop(name).close()

    @property
    def target(self) -> str:
        """What a client calls: all routers at once."""
        return f"ipv4:{','.join(self._routers)}"

    @property
    def names(self) -> tuple[str, ...]:
        """The processes that run, in the order in which they were started."""
        return tuple(self._processes)

    def process(self, name: str) -> subprocess.Popen[str]:
        """The process of that name."""
        return self._processes[name].process

    def log(self, name: str) -> list[str]:
        """What it wrote to standard error so far."""
        return self._processes[name].log

    def start_router(self, index: int) -> str:
        """Router `index` on its port; returns its name once it listens."""
        arguments = ("router", "--model", self._model, "--listen", self._routers[index])
        return self._start(f"router-{index}", arguments)

    def is_used(self, router: str) -> bool:
        """Whether callers have found this router: it answered a request since it started."""
        with Client(self._processes[router].target) as client:
            return client.status(timeout_s=JOIN_TIMEOUT_S).recent.total_requests > 0

    def start_worker(self, role: Role, name: str, *options: str) -> str:
        """A worker that every running router can use when this returns. Raises RuntimeError if it never is.

        `options`: of this worker alone.
        """
        routers = [option for router in self._routers for option in ("--router", router)]
        arguments = (role.value, "--model", self._model, "--worker-id", name, "--threads", "1", *routers)
        self._start(name, (*arguments, *self._options, *options))
        if not eventually(
            lambda: all(self._is_usable(name, router) for router in self._live_routers()), JOIN_TIMEOUT_S
        ):
            raise RuntimeError(f"{name} did not join:\n" + "".join(self.log(name)))
        return name

    def stop(self, name: str) -> Exit:
        """SIGTERM, then the wait for its end. Raises TimeoutExpired, after killing, if it hangs."""
        begin_s = time.monotonic()
        code = self._processes[name].stop()
        seconds = time.monotonic() - begin_s
        self._stacks.pop(name).close()
        del self._processes[name]
        return Exit(name, code, seconds)

    def stop_twice(self, name: str) -> Exit:
        """SIGTERM, and another one as soon as the first was heard: it must end at once."""
        process = self.process(name)
        process.send_signal(signal.SIGTERM)
        eventually(lambda: any("stopping" in line for line in self.log(name)))
        return self.stop(name)

    def _start(self, name: str, arguments: tuple[str, ...]) -> str:
        stack = contextlib.ExitStack()
        self._processes[name] = stack.enter_context(run_command(*arguments))
        self._stacks[name] = stack
        return name

    def _live_routers(self) -> Iterator[str]:
        return (cluster.target for name, cluster in self._processes.items() if name.startswith("router"))

    def _is_usable(self, name: str, router: str) -> bool:
        with Client(router) as client:
            status = client.status(timeout_s=JOIN_TIMEOUT_S)
        return any(worker.info.worker_id == name and worker.connected for worker in status.workers)
