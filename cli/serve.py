"""`tandem serve`: routers and their workers as supervised child processes.

start   routers → their addresses → workers → health SERVING → `ready HOST:PORT` on stdout
keep    a child that ends, whatever its code, or stands still is replaced
stop    routers (NOT_SERVING at once, finish what runs) → workers → exit 0
second signal, or this process killed: every child ends at once

One router listens on `--listen` and `--http`. Several share both: the kernel deals connections out among them
(SO_REUSEPORT). Each also listens on a port of its own, where all workers register. The routers know nothing of each
other.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from cli.command import Subparsers, add_command
from cli.launch import launch_command
from cli.supervisor import START_TIMEOUT_S, Child, RestartPolicy, Supervisor, open_process
from kernels.cpu.core_loans import CoreLedger, CoreLoan
from models.files.checkpoint import resolve_model
from models.files.hub import fetched
from models.preflight import check_loadable
from shell import progress
from shell.clock import MonotonicClock
from shell.config import DEFAULT_ADMIN_ADDRESS, ServeConfig, add_arguments, argv_of, environment, load
from shell.core_order import neighbouring_cores
from shell.cores import plan_cores, share_all_cores
from shell.gpus import DevicePlan, DeviceShare, find_gpus, plan_devices
from shell.host_memory import available_host_bytes
from shell.rpc.address import is_taken, local_address
from shell.rpc.process import StopSignal, run_process
from shell.telemetry.logging import configure_logging, get_logger
from shell.telemetry.stderr_lines import write_line
from tandem.client import AsyncClient
from tandem.errors import ConfigError, TandemError
from tandem.option_values import Share
from tandem.security.credentials import Security
from tandem.security.options import client_side

_log = get_logger(__name__)

_ALL_GPUS = (("auto",), ("cuda",))
"""Values of `--device` that mean every GPU."""
STOP_MARGIN_S = 5.0
"""Time beyond a child's own drain grace after which the child is killed."""
_ANY_PORT = "127.0.0.1:0"
_WORKERS = ("prefill_worker", "decode_worker")
DEFAULT_CPU_WORKERS = 2
"""Measured on two cores: a core each, they compute 17 % more prompt tokens than one worker on both, and only then can
prompts go where nobody decodes (bench/LOG.md). While one is idle, the other has both."""


def add_parser(subparsers: Subparsers) -> None:
    """Declares the command."""
    parser = add_command(
        subparsers,
        "serve",
        run,
        "Prints `ready HOST:PORT` on stdout once it can serve; everything else goes to stderr. A process that ends or "
        "stands still is replaced. Ctrl-C or SIGTERM finishes running requests, a second one ends at once. The cores "
        "that this process may use are divided among the workers (--threads N gives each N threads instead).",
    )
    add_arguments(parser, ServeConfig)


def run(namespace: argparse.Namespace) -> int:
    """Serves until a stop signal; returns the exit code. Raises ConfigError, CheckpointError."""
    config = load(ServeConfig, namespace)
    check_fleet(config)
    Security.load(config.router.security, config.router.ports)  # each child would find the same fault
    configure_logging("serve", config.router.log_format, config.router.log_level)
    progress.show_in_log()
    config = config.of_model(fetched(config.decode_worker.model))  # once, for all children
    worker = config.decode_worker
    check_loadable(resolve_model(worker.model), worker.model_impl)  # before children start
    devices = fleet_devices(config, find_gpus(environment().get("CUDA_VISIBLE_DEVICES")))
    check_host_memory(config, devices, available_host_bytes())
    return run_process(lambda stop: _serve(config, devices, stop))


async def _serve(config: ServeConfig, devices: DevicePlan, stop: StopSignal) -> None:
    async with asyncio.TaskGroup() as tasks:
        server = _Server(config, devices, tasks)
        stop.on_abort(server.kill)
        start = tasks.create_task(server.start(), name="start")
        await stop.wait()
        start.cancel()
        await server.stop()


class _Server:
    """The children, in the order of their start and stop."""

    def __init__(self, config: ServeConfig, devices: DevicePlan, tasks: asyncio.TaskGroup) -> None:
        self._config = config
        self._tasks = tasks
        self._cores = neighbouring_cores()
        self._devices = devices
        self._routers: list[Supervisor] = []
        self._http: str | None = None
        self._router_listens = [config.router.listen]
        """Own address of each router; later lives listen where the first one did."""
        self._shared_listen: str | None = None
        self._held_ports = contextlib.ExitStack()
        self._workers: list[Supervisor] = []
        worker = config.decode_worker
        lends = worker.threads is None and worker.num_ranks == 1 and sys.platform == "linux"
        self._ledger = CoreLedger(self._cores) if lends else None
        self._stopping = False

    async def start(self) -> None:
        """Returns once the ready line is printed; a child's failure ends the task group instead."""
        num_workers = len(self._devices.prefill) + len(self._devices.decode)
        pages: list[str] = []
        with progress.steps("starting", 1 + num_workers) as started:
            listen = await self._start_routers()
            started()
            addresses = tuple(map(local_address, self._router_listens))
            specs = worker_specs(self._config, self._cores, addresses, self._devices)
            for spec in specs if self._ledger is None else with_loans(specs, self._ledger.path):
                self._workers.append(self._supervise(spec, partial(self._start_child, spec)))
            counting = [self._tasks.create_task(_call_when_ready(worker, started)) for worker in self._workers]
            for router in self._routers:
                async with self._connect(await router.address()) as client:
                    await client.wait_ready(START_TIMEOUT_S)
                    with contextlib.suppress(TandemError):  # it is restarted
                        pages.append((await client.status()).admin_address)
            for each in counting:  # one that left before it was ready is not waited for
                each.cancel()
        scheme = "http" if self._config.router.security.tls_cert is None else "https"
        for address in filter(None, pages):
            _log.info("admin page", url=f"{scheme}://{address}/")
        print(f"ready {listen}", flush=True)

    async def _start_routers(self) -> str:
        """Returns the address for callers, once all routers listen. Raises ConfigError if it is in use."""
        count, http = self._config.router_processes, self._config.router.http
        if http is not None:  # all routers, and later lives of each, are to have the same port
            self._http = self._hold("--http", http) if count > 1 else _with_port(http)
        if count > 1:
            self._shared_listen = self._hold("--listen", self._config.router.listen)
            self._router_listens = [self._hold("--listen", _ANY_PORT) for _ in range(count)]
        for index in range(count):
            self._routers.append(self._supervise(self._router_spec(index), partial(self._start_router, index)))
        self._router_listens = [await router.address() for router in self._routers]
        return self._shared_listen or self._router_listens[0]

    def _start_router(self, index: int) -> Child:
        return self._start_child(self._router_spec(index))

    def _router_spec(self, index: int) -> ChildSpec:
        config = replace(self._config, router=replace(self._config.router, http=self._http))
        return router_spec(config, self._cores, self._router_listens[index], self._shared_listen, index)

    def _hold(self, option: str, listen: str) -> str:
        """Keeps the port of `listen`, a free one instead of 0, for routers that share it; returns the address.

        Nothing arrives at the socket, as it does not listen.
        """
        host, _, port = listen.rpartition(":")
        family, kind, _, _, address = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)[0]
        held = self._held_ports.enter_context(socket.socket(family, kind))
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections of an earlier server may linger
        if is_taken(listen, shared=False):  # processes that share a port do not notice another server there
            raise ConfigError(option, f"cannot listen on {listen}; is the port in use?")
        try:
            held.bind(address)
        except OSError as error:
            raise ConfigError(option, f"cannot listen on {listen}: {error.strerror}") from error
        return f"{host}:{held.getsockname()[1]}"

    async def stop(self) -> None:
        """Ends the routers first, so that requests that run can finish on the workers."""
        self._stopping = True
        await asyncio.gather(*(router.stop() for router in self._routers))
        await asyncio.gather(*(worker.stop() for worker in self._workers))
        if self._ledger is not None:
            self._ledger.close()
        self._held_ports.close()

    def kill(self) -> None:
        """Ends every child at once."""
        for supervisor in (*self._routers, *self._workers):
            supervisor.kill()

    def _supervise(self, spec: ChildSpec, start: Callable[[], Child]) -> Supervisor:
        policy = RestartPolicy(MonotonicClock())
        supervisor = Supervisor(spec.name, start, self._connect, policy, spec.stop_grace_s)
        if self._stopping:  # a cancelled `start` goes on if Python 3.11's `wait_for` ends just then
            supervisor.kill()
        self._tasks.create_task(supervisor.run(), name=f"keep-{spec.name}")
        return supervisor

    def _connect(self, address: str) -> AsyncClient:
        return AsyncClient(local_address(address), security=client_side(self._config.router.security))

    def _start_child(self, spec: ChildSpec) -> Child:
        if self._ledger and spec.module in _WORKERS:
            self._ledger.occupy(spec.cores)  # while it loads
        command = launch_command(spec.module, spec.arguments, spec.cores, spec.nice, spec.gpus, spec.loan)
        prefix = "" if self._config.router.log_format == "json" else f"{spec.name:<9} | "
        return Child(open_process(command), lambda line: write_line(f"{prefix}{line}"))


def _with_port(listen: str) -> str:
    """Returns HOST:PORT with a port that is free now in the place of 0."""
    host, _, port = listen.rpartition(":")
    if port != "0":
        return listen
    family, kind, _, _, address = socket.getaddrinfo(host.strip("[]"), 0, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, kind) as probe:
        probe.bind(address)
        return f"{host}:{probe.getsockname()[1]}"


async def _call_when_ready(worker: Supervisor, started: progress.Step) -> None:
    await worker.address()
    started()


def check_fleet(config: ServeConfig) -> None:
    """Raises ConfigError if these workers together could never serve, or are of both kinds of fleet."""
    if config.is_static and config.num_workers is not None:
        raise ConfigError("--workers", "counts elastic workers; with --prefill or --decode there are none")
    if config.num_prefill == 0 and config.decode_worker.local_prefill_tokens is not None:
        raise ConfigError("--prefill", "0 prefill workers need --local-prefill-tokens unlimited")


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """A child: `python -m MODULE ARG…` on its share of the cores."""

    name: str
    module: str
    arguments: tuple[str, ...]
    cores: tuple[int, ...]
    nice: int
    stop_grace_s: float
    gpus: tuple[str, ...] = ()
    """GPUs that it sees, its own first; empty = those that this process sees."""
    loan: str | None = None
    """Cores of another worker that the child may borrow."""


def router_spec(
    config: ServeConfig, cores: Sequence[int], listen: str, shared_listen: str | None = None, index: int = 0
) -> ChildSpec:
    """Returns a router on all cores: it computes little, but must answer promptly.

    `index`: number of the router; an admin port that is given goes up by one from each router to the next. The default
    is the first router's.
    """
    admin_listen = config.router.admin_listen
    host, _, port = (admin_listen or "").rpartition(":")
    if index and admin_listen == DEFAULT_ADMIN_ADDRESS:
        admin_listen = _ANY_PORT
    elif port not in ("", "0"):
        admin_listen = f"{host}:{int(port) + index}"
    router = replace(config.router, listen=listen, shared_listen=shared_listen, admin_listen=admin_listen)
    grace_s = router.drain_grace_s + STOP_MARGIN_S
    name = "router" if shared_listen is None else f"router-{index}"
    return ChildSpec(name, "router", tuple(argv_of(router)), tuple(cores), 0, grace_s)


def fleet_devices(config: ServeConfig, gpus: Sequence[str]) -> DevicePlan:
    """Returns what each worker computes on, of `gpus`; without any, as `--device` says. Raises ConfigError."""
    counts, devices = _counts(config, gpus), config.devices
    if len(devices) == 1 and (devices == ("cpu",) or not gpus):
        return DevicePlan(*((DeviceShare(devices[0]),) * count for count in counts))
    return plan_devices(gpus, *counts, () if devices in _ALL_GPUS else devices)


def _counts(config: ServeConfig, gpus: Sequence[str]) -> tuple[int, int]:
    """Returns the numbers of prefill workers and of workers that decode; elastic workers all decode."""
    if config.is_static:
        return 1 if config.num_prefill is None else config.num_prefill, config.num_decode or 1
    on_cpus = config.devices == ("cpu",)
    num_devices = len(gpus if config.devices in _ALL_GPUS else () if on_cpus else config.devices)
    return 0, config.num_workers or num_devices or DEFAULT_CPU_WORKERS


def check_host_memory(config: ServeConfig, devices: DevicePlan, available_bytes: int | None) -> None:
    """Raises ConfigError if the claims of all workers together exceed the available host memory."""
    if available_bytes is None:
        return
    shares = (*devices.prefill, *devices.decode)
    worker = config.decode_worker
    in_host = 0 if devices.on_gpus else len(shares)  # of workers on CPUs beside GPUs, each checks its own
    pool = worker.kv_memory.of(available_bytes) if isinstance(worker.kv_memory, Share) else worker.kv_memory or 0
    claims = {
        "--kv-memory": int(in_host * pool),
        "--host-cache-memory": len(shares) * (worker.host_cache_bytes if worker.prefix_cache else 0),
    }
    total = sum(claims.values())
    if total > available_bytes:
        largest = max(claims, key=claims.__getitem__)
        raise ConfigError(
            largest, f"{len(shares)} workers claim {total} bytes of memory; {available_bytes} are available"
        )


def worker_specs(
    config: ServeConfig, cores: Sequence[int], routers: tuple[str, ...], devices: DevicePlan
) -> list[ChildSpec]:
    """Returns all workers, registered with the routers at HOST:PORT; on loopback, as only these call them."""
    counts = len(devices.prefill), len(devices.decode)
    split = share_all_cores if devices.on_gpus else plan_cores
    plan = split(cores, *counts, config.decode_worker.threads)
    decoding = replace(config.decode_worker, elastic=not config.is_static)
    kinds = (
        ("prefill", "prefill_worker", config.prefill_worker, zip(plan.prefill, devices.prefill, strict=True)),
        (
            *("decode" if config.is_static else "worker", "decode_worker", decoding),
            zip(plan.decode, devices.decode, strict=True),
        ),
    )
    specs: list[ChildSpec] = []
    for kind, module, worker, shares in kinds:
        for index, (share, device) in enumerate(shares):
            name = f"{kind}-{index}"
            own = replace(
                worker,
                router=routers,
                worker_id=name,
                threads=share.threads,
                admin_listen=None if config.router.admin_listen is None else _ANY_PORT,
                device=device.device,
                device_workers=device.num_workers,
                host_workers=sum(counts),
            )
            grace_s = worker.drain_grace_s + STOP_MARGIN_S
            arguments = tuple(argv_of(own))
            specs.append(ChildSpec(name, module, arguments, share.cores, share.nice, grace_s, device.gpus))
    return specs


def with_loans(specs: Sequence[ChildSpec], ledger: str) -> list[ChildSpec]:
    """Returns `specs` whose workers lend cores: each may borrow those of the worker before it, the first of the last.

    Workers that share cores lend none.
    """
    cores = [core for spec in specs for core in spec.cores]
    if len(specs) == 1 or len(set(cores)) < len(cores):
        return list(specs)
    lenders = (specs[-1], *specs[:-1])
    return [
        replace(spec, loan=str(CoreLoan(ledger, lender.cores))) for spec, lender in zip(specs, lenders, strict=True)
    ]
