"""The children that a `tandem serve` command line asks for, as data. Pure; starts nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tandem.config import ServeConfig, argv_of
from tandem.cores import plan_cores, share_all_cores
from tandem.errors import ConfigError

STOP_MARGIN_S = 5.0
"""On top of a child's own drain grace, before it is killed."""
_ADMIN_LISTEN = "127.0.0.1:0"
"""Of workers, unless the router is to have no admin port either."""
_LOOPBACK = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]"}


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """One child: `python -m MODULE ARG…` on its share of the cores."""

    name: str
    module: str
    arguments: tuple[str, ...]
    cores: tuple[int, ...]
    nice: int
    stop_grace_s: float


def check(config: ServeConfig) -> None:
    """Raises ConfigError if these workers together could never serve."""
    if config.num_prefill == 0 and config.decode_worker.local_prefill_tokens is not None:
        raise ConfigError("--prefill", "0 prefill workers need --local-prefill-tokens unlimited")


def router_spec(config: ServeConfig, cores: Sequence[int], listen: str) -> ChildSpec:
    """The router, on all cores: it computes little, but must answer promptly."""
    router = replace(config.router, listen=listen)
    grace_s = router.drain_grace_s + STOP_MARGIN_S
    return ChildSpec("router", "router", tuple(argv_of(router)), tuple(cores), 0, grace_s)


def local_address(address: str) -> str:
    """Where this machine reaches a server that listens on `address`, which may be a wildcard."""
    host, _, port = address.rpartition(":")
    return f"{_LOOPBACK.get(host, host)}:{port}"


def worker_specs(config: ServeConfig, cores: Sequence[int], router: str, *, on_gpu: bool) -> list[ChildSpec]:
    """All workers, registered with the router at HOST:PORT `router`; on loopback, as only it calls them."""
    split = share_all_cores if on_gpu else plan_cores
    plan = split(cores, config.num_prefill, config.num_decode, config.decode_worker.threads)
    admin_listen = None if config.router.admin_listen is None else _ADMIN_LISTEN
    roles = (("prefill", config.prefill_worker, plan.prefill), ("decode", config.decode_worker, plan.decode))
    specs: list[ChildSpec] = []
    for role, worker, shares in roles:
        for index, share in enumerate(shares):
            name = f"{role}-{index}"
            own = replace(worker, router=(router,), worker_id=name, threads=share.threads, admin_listen=admin_listen)
            grace_s = worker.drain_grace_s + STOP_MARGIN_S
            specs.append(ChildSpec(name, f"{role}_worker", tuple(argv_of(own)), share.cores, share.nice, grace_s))
    return specs
