"""`tandem router`: one router, as one process or as several that share its port.

The processes know nothing of each other: the kernel deals connections out among them (SO_REUSEPORT), workers register
with each (`worker.serving.announcer`). Here they are started, replaced when they end or stand still, and ended
together.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import socket
from collections.abc import Callable
from dataclasses import replace

from cli.command import Subparsers, add_command
from cli.launch import launch_command
from cli.supervisor import Child, RestartPolicy, Supervisor, open_process
from shell.clock import MonotonicClock
from shell.config import RouterConfig, add_arguments, argv_of, load
from shell.cores import usable_cores
from shell.rpc.address import local_address
from shell.rpc.process import StopSignal, run_process
from shell.telemetry.logging import configure_logging
from shell.telemetry.stderr_lines import write_line
from tandem.client import AsyncClient
from tandem.errors import ConfigError
from tandem.security.credentials import Security
from tandem.security.options import client_side

STOP_MARGIN_S = 5.0
"""On top of a child's own drain grace, before it is killed."""
_TRIES = 100


def add_parser(subparsers: Subparsers) -> None:
    """Declares the command."""
    description = (
        "Accepts requests, places them on the workers that register with it, streams their tokens. Prints "
        "`ready HOST:PORT` on stdout once it listens."
    )
    add_arguments(
        add_command(subparsers, "router", run, "one router, of one or more processes", description), RouterConfig
    )


def run(namespace: argparse.Namespace) -> int:
    """Runs until SIGTERM; returns the exit code. Raises ConfigError."""
    config = load(RouterConfig, namespace)
    if config.processes == 1 or config.process is not None:
        from router import app  # what only one process needs

        return app.run(config)
    Security.load(config.security, config.ports)  # before children start: each would find the same fault
    configure_logging("router", config.log_format, config.log_level)
    return run_process(lambda stop: _supervise(config, stop))


def process_configs(config: RouterConfig, processes: int) -> list[RouterConfig]:
    """Of each process of a router; its port is free. An admin port that is given goes up by one from each to the next.

    Raises ConfigError if the ports cannot be had.
    """
    if processes == 1:
        return [config]
    listen = claimed(config.listen, processes)
    host, _, admin_port = (config.admin_listen or "").rpartition(":")
    configs = []
    for process in range(processes):
        admin = config.admin_listen if admin_port in ("", "0") else f"{host}:{int(admin_port) + process}"
        configs.append(replace(config, listen=listen, admin_listen=admin, processes=processes, process=process))
    return configs


def claimed(listen: str, processes: int) -> str:
    """`listen` with its port, chosen if that is 0: nobody listens on it, nor on those of the processes behind it.

    Looked at once, before they start: processes that share a port do not notice another router that has it.
    """
    host, _, port = listen.rpartition(":")
    for _ in range(_TRIES if port == "0" else 1):
        with contextlib.ExitStack() as held:
            try:
                first = _bound(held, host, int(port))
                for offset in range(processes):
                    _bound(held, host, first + 1 + offset)
            except (OSError, OverflowError):  # the latter: beyond the last port
                continue
            return f"{host}:{first}"
    ports = f"{port} and the {processes} after it" if port != "0" else f"{processes + 1} ports in a row"
    raise ConfigError("--listen", f"cannot listen on {ports}; are they in use?")


def _bound(held: contextlib.ExitStack, host: str, port: int) -> int:
    family = socket.AF_INET6 if host.startswith("[") else socket.AF_INET
    bound = held.enter_context(socket.socket(family, socket.SOCK_STREAM))
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    bound.bind((host.strip("[]"), port))
    number: int = bound.getsockname()[1]
    return number


async def _supervise(config: RouterConfig, stop: StopSignal) -> None:
    configs = process_configs(config, config.processes)
    async with asyncio.TaskGroup() as tasks:
        supervisors = [
            Supervisor(
                f"router-{each.process}",
                _starter(each),
                lambda address: AsyncClient(local_address(address), security=client_side(config.security)),
                RestartPolicy(MonotonicClock()),
                each.drain_grace_s + STOP_MARGIN_S,
            )
            for each in configs
        ]
        for each in supervisors:
            stop.on_abort(each.kill)
            tasks.create_task(each.run(), name=f"keep-{each.name}")
        ready = tasks.create_task(_tell_ready(configs[0].listen, supervisors), name="ready")
        await stop.wait()
        ready.cancel()
        await asyncio.gather(*(each.stop() for each in supervisors))


async def _tell_ready(listen: str, supervisors: list[Supervisor]) -> None:
    for each in supervisors:
        await each.address()
    print(f"ready {listen}", flush=True)


def _starter(config: RouterConfig) -> Callable[[], Child]:
    command = launch_command("router", tuple(argv_of(config)), usable_cores(), 0)
    prefix = "" if config.log_format == "json" else f"router-{config.process} | "
    return lambda: Child(open_process(command), lambda line: write_line(f"{prefix}{line}"))
