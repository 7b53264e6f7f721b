from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models

from router.placement import Obstacle, WorkerView
from router.prefix_map import PrefixMap
from router.workers import Workers
from tandem.types import Incarnation, PoolCounts, Role, WorkerId, WorkerInfo, WorkerLoad
from tests.byte_tokenizer import make_byte_tokenizer
from tests.manual_clock import ManualClock
from tests.registering import INFO

LEASE_S, STALL_S = 5.0, 30.0
LOAD = WorkerLoad(0, 0, 0, 0, PoolCounts(64, 64, 0, 0, 0, 0, 16, 0), 0, draining=False)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def load() -> Callable[..., WorkerLoad]:
    """An idle worker's heartbeat with changes; `free` is of its pool."""

    def make(free: int = 64, **changes: Any) -> WorkerLoad:
        return replace(LOAD, pool=replace(LOAD.pool, free=free, live=64 - free), **changes)

    return make


@pytest.fixture
def info() -> Callable[..., WorkerInfo]:
    """A worker that fits every other one, with changes."""

    def make(role: Role, name: str, **changes: Any) -> WorkerInfo:
        made = replace(
            INFO,
            worker_id=WorkerId(name),
            incarnation=Incarnation(f"{name}-life-1"),
            role=role,
            model="tiny",
            config_fingerprint="config",
            model_fingerprint="weights",
            layout_fingerprint="layout",
            transports=("shm", "tcp"),
            max_sequence_tokens=256,
        )
        return replace(made, **changes)

    return make


@pytest.fixture
def view(info: Callable[..., WorkerInfo]) -> Callable[..., WorkerView]:
    """A usable worker as placement sees it."""

    def make(
        role: Role, name: str, load: WorkerLoad = LOAD, obstacle: Obstacle | None = None, **changes: Any
    ) -> WorkerView:
        return WorkerView(info(role, name, **changes), load, obstacle)

    return make


class FakeLink:
    """A stream to a worker that stands when the test says so."""

    def __init__(self, info: WorkerInfo, events: list[tuple[str, str]], on_change: Callable[[], None]) -> None:
        self._connected = False
        self._on_change = on_change
        self.held = PrefixMap()
        self._info = info
        self._events = events
        events.append(("added", info.incarnation))

    @property
    def connected(self) -> bool:
        return self._connected

    @connected.setter
    def connected(self, connected: bool) -> None:
        self._connected = connected
        self._on_change()

    def close(self) -> None:
        self._events.append(("lost", self._info.incarnation))


@pytest.fixture
def events() -> list[tuple[str, str]]:
    """Links that were opened ("added") and closed ("lost"), each with the incarnation."""
    return []


@pytest.fixture
def workers(clock: ManualClock, events: list[tuple[str, str]]) -> Workers:
    """A router's workers, without streams to them."""

    def open_link(info: WorkerInfo, on_change: Callable[[], None]) -> Any:
        return FakeLink(info, events, on_change)

    return Workers("tiny", "config", clock, LEASE_S, STALL_S, open_link, Random(1))


@pytest.fixture(scope="session")
def byte_tokenizer() -> Tokenizer:
    return make_byte_tokenizer()


@pytest.fixture(scope="session")
def sentencepiece_tokenizer() -> Tokenizer:
    """Llama 2's kind: words begin with ▁, unknown characters fall back to bytes."""
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁Hi", "▁you", "a", "b"]
    tokenizer = Tokenizer(models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=[], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer
