"""The config tree of each process, frozen; the sole reader of the environment.

Every option is one field here (or in `limits`). `load` takes it from argv, then from `TANDEM_<OPTION>`, then from the
file of `--config`, then its default; a bad value, an unknown `TANDEM_` key or an unknown key of the file raises
ConfigError.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

from shell.config_file import OPTION, read_config_file
from shell.removed_options import REMOVED
from shell.worker_config import (
    DecodeConfig,
    ElasticConfig,
    Ports,
    PrefillConfig,
    ProcessConfig,
    WorkerConfig,
    admin_option,
    config_option,
)
from tandem import options
from tandem.client_config import DEFAULT_ADDRESS, ClientConfig
from tandem.limits import Limits
from tandem.option_values import host_port, integer, one_of, seconds, size_bytes, text
from tandem.options import Given, Section, argv_of, check_known, grouped, load_options, option, options_of
from tandem.security.options import ClientSecurityConfig, SecurityConfig

__all__ = [
    "DEFAULT_ADDRESS",
    "ClientConfig",
    "ClientSecurityConfig",
    "DecodeConfig",
    "ElasticConfig",
    "Limits",
    "PrefillConfig",
    "RouterConfig",
    "SecurityConfig",
    "ServeConfig",
    "WorkerConfig",
    "add_arguments",
    "argv_of",
    "environment",
    "load",
    "show_gpus",
]

DEFAULT_ADMIN_ADDRESS = "127.0.0.1:9090"
"""A router's, as in every manifest; where another process has it, the router takes any free port."""
_VISIBLE_GPUS = "CUDA_VISIBLE_DEVICES"
_CORE_LOAN = "TANDEM_CORE_LOAN"
"""Set by `tandem serve` for its workers alone; not an option."""

T = TypeVar("T")

_model = partial(option, Section.MODEL)
_address = partial(option, Section.ADDRESSES)
_queue = partial(option, Section.QUEUE)
_fleet = partial(option, Section.FLEET)


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig(ProcessConfig):
    """`tandem router`."""

    served_model_names: tuple[str, ...] = _model(
        "served-model-name",
        (),
        "what clients call the model, the first is told them; none: the name of its folder",
        text(r"\S{1,256}", "1 to 256 characters without spaces", "NAME"),
    )
    chat_template: str | None = _model(
        "chat-template",
        None,
        "file with the Jinja template of chats; none: the model's own",
        text(shown="FILE"),
        none_word="none",
    )
    model_fingerprint: str | None = _model(
        "model-fingerprint",
        None,
        "requests go only to workers whose model fingerprint begins so; none: to the largest set of equal workers",
        text(r"[0-9a-f]{8,64}", "8 to 64 hexadecimal digits", "HEX"),
        none_word="none",
    )
    listen: str = _address("listen", DEFAULT_ADDRESS, "address to serve on", host_port(port_zero=True))
    admin_listen: str | None = admin_option(DEFAULT_ADMIN_ADDRESS)
    shared_listen: str | None = option(
        Section.INTERNAL,
        "shared-listen",
        None,
        "a second address, which routers of one machine share: each new connection goes to one of them. Each has a "
        "--listen of its own, where workers register; `tandem serve --router-processes` sets both",
        host_port(),
        none_word="none",
    )
    http: str | None = _address(
        "http",
        None,
        "address at which OpenAI's and Anthropic's APIs are served over HTTP; --tls-cert and --token-file hold there",
        host_port(port_zero=True),
        none_word="none",
    )
    http_origins: tuple[str, ...] = _address(
        "http-origins",
        (),
        "web origins whose pages may call the HTTP port from a browser, such as https://chat.example; * = all",
        text(r"\*|https?://[^\s/,]+", "an origin such as https://chat.example, or *", "ORIGIN"),
    )
    max_queued_requests: int = _queue(
        "max-queued-requests", 1024, "requests that may wait for admission", integer(0, 1_000_000)
    )
    max_queued_tokens: int = _queue(
        "max-queued-tokens", 4_194_304, "prompt tokens that may wait for admission", integer(1)
    )
    max_active_requests: int = _queue(
        "max-active-requests",
        0,
        "requests under way at a time; 0 = two for each seat of the workers that serve, and at least 256",
        integer(0, 1_000_000),
    )
    max_unread_bytes: int = _queue(
        "max-unread-bytes",
        256 * 1024 * 1024,
        "memory of answers that callers have not read; beyond it the request with the most is ended, and any request "
        "that has more than a quarter of it",
        size_bytes(1024 * 1024),
    )
    stream_interval_s: float = _queue(
        "stream-interval-seconds",
        0.0,
        "shortest time between two messages of a stream, after its first: tokens that come meanwhile are merged; 0 = "
        "a message per token, as long as the client keeps up",
        seconds(0, 60),
    )
    max_unread_s: float = 60.0
    """A request is ended whose answer is not read for longer: a client behind a broken network is gone by then."""
    patience_s: float = _queue(
        "patience-seconds",
        10.0,
        "how long a request waits, as far as its deadline allows, for workers that are missing or were lost",
        seconds(0, 3600),
    )
    fallback: str = _queue("fallback", "fail", "without prefill workers: fail, local", one_of("fail", "local"))
    max_priority: int = _queue(
        "max-priority",
        0,
        "highest priority that a request may have, unless the token file says otherwise of its token",
        integer(-(2**31), 2**31 - 1),
    )
    lease_s: float = 5.0
    """Silence after which a worker is lost: a process that stands still for half of it keeps its streams."""

    @property
    def ports(self) -> Ports:
        """Returns where the router listens."""
        own = (("--listen", self.listen), ("--admin-listen", self.admin_listen))
        return (*own, ("--shared-listen", self.shared_listen), ("--http", self.http))


_SET_BY_SERVE = (
    *("listen", "router", "advertise", "worker_id", "device", "admin_listen", "kv_port", "device_workers"),
    *("host_workers", "kv_events", "kv_events_topic", "elastic", "config_file"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeConfig:
    """`tandem serve`: a router and its workers as child processes.

    The three groups share their options; an option that is not given keeps each group's own
    default. `argv_of(replace(config.decode_worker, router=..., worker_id=...))` is a child's argv.
    """

    config_file: str | None = config_option()
    num_workers: int | None = _fleet(
        "workers",
        None,
        "elastic workers, which compute prompts and decode, as each request and step needs; auto = one per GPU, or two "
        "without GPUs",
        integer(1, 64),
        none_word="auto",
    )
    num_prefill: int | None = _fleet(
        "prefill",
        None,
        "prefill workers; with it or --decode there are no elastic workers; auto = 1 with --decode",
        integer(0, 64),
        none_word="auto",
    )
    num_decode: int | None = _fleet(
        "decode", None, "decode workers; auto = 1 with --prefill", integer(1, 64), none_word="auto"
    )
    devices: tuple[str, ...] = option(
        Section.COMPUTE,
        "device",
        ("auto",),
        "auto, cpu, cuda, or a list of cpu, cuda:I and UUIDs that begin with GPU- or MIG-, dealt round, prefill "
        "workers first; auto and cuda share all GPUs out evenly",
        text(
            r"auto|cpu|cuda(:\d{1,4})?|(GPU|MIG)-[\w/-]{1,100}",
            "auto, cpu, cuda, cuda:I, or a UUID that begins with GPU- or MIG-",
            "DEVICE",
        ),
    )
    router_processes: int = _fleet(
        "router-processes", 1, "routers, each a process, which share the port of --listen", integer(1, 64)
    )
    router: RouterConfig = grouped(RouterConfig, own=("shared_listen", "config_file"))
    prefill_worker: PrefillConfig = grouped(PrefillConfig, own=_SET_BY_SERVE)
    decode_worker: DecodeConfig = grouped(DecodeConfig, own=_SET_BY_SERVE)

    @property
    def is_static(self) -> bool:
        """Whether its workers have static roles."""
        return self.num_prefill is not None or self.num_decode is not None

    def of_model(self, model: str) -> ServeConfig:
        """Returns a config that is equal but for `--model`."""
        return replace(
            self,
            router=replace(self.router, model=model),
            prefill_worker=replace(self.prefill_worker, model=model),
            decode_worker=replace(self.decode_worker, model=model),
        )


_ALL: tuple[type[Any], ...] = (RouterConfig, PrefillConfig, DecodeConfig, ElasticConfig, ServeConfig, ClientConfig)


def add_arguments(parser: argparse.ArgumentParser, cls: type[Any]) -> None:
    """Adds the options of `cls`, and refuses removed options."""
    options.add_arguments(parser, cls, REMOVED)


def load(cls: type[T], namespace: argparse.Namespace, environ: Mapping[str, str] | None = None) -> T:
    """Reads one process's config. `environ` None = this process's own.

    Raises ConfigError that names the flag, the variable or the file's key: bad value, unknown key.
    """
    variables = os.environ if environ is None else environ
    check_known({name: value for name, value in variables.items() if name != _CORE_LOAN}, _ALL, REMOVED)
    given = Given(namespace, variables)
    known = {each.name: each for each in options_of(cls)}
    if OPTION in known and (path := given.value_of(known[OPTION])) is not None:
        given = Given(namespace, variables, read_config_file(path, known))
    return load_options(cls, given)


def environment() -> Mapping[str, str]:
    """This process's variables, for what is not Tandem's own to name."""
    return os.environ


def show_gpus(names: str) -> None:
    """From now on CUDA, and programs that this process becomes or starts, see these only, in this order."""
    os.environ[_VISIBLE_GPUS] = names


def lend_cores(loan: str) -> None:
    """From now on kernels of this process, or of the program that it becomes, may use the cores that `loan` names."""
    os.environ[_CORE_LOAN] = loan


def core_loan() -> str | None:
    """Returns what `lend_cores` was given for this process."""
    return os.environ.get(_CORE_LOAN)


def keep_ucx_off_other_processes() -> None:
    """UCX then moves bytes by networks alone, never by writing another process's memory on this host.

    Of such writes only that other process could prove the end. To be called before UCX is initialized.
    """
    os.environ["UCX_TLS"] = "^cma,knem,xpmem,posix,sysv,cuda_ipc,rocm_ipc"
