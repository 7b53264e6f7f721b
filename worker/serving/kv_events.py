"""Publishes what the prefix cache holds as vLLM does, for routers that read its KV events (docs/kv_transfer.md).

    cache ─events─▶ loop: one numbered batch per turn ─queue─▶ thread ─┬─▶ PUB     [topic, number, payload]
                                                                      └─▶ ROUTER  replays kept batches on request

Nothing here can make the loop or the worker wait: the queue is bounded, a subscriber that does not read loses batches,
and sees that by the gap in their numbers. Written from the schema of vllm/distributed/kv_events.py.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, TypeAlias

import msgpack
import zmq

from shell.config import WorkerConfig
from shell.telemetry.logging import get_logger
from tandem.errors import ConfigError
from tandem.types import TokenId

MAX_QUEUED = 10_000
"""Batches that wait for the thread; beyond it, the oldest is lost to everybody."""
MAX_KEPT = 10_000
MAX_KEPT_BYTES = 64 * 1024 * 1024
"""Bytes of the latest batches, for replays."""
MAX_UNREAD = 10_000
"""Batches that wait for one subscriber; beyond it, it loses what is new."""
_MAX_RECEIVED_BYTES = 1024
"""The most bytes of a subscription or a request for a replay."""
_NUMBER_BYTES = 8
_END = (-1).to_bytes(_NUMBER_BYTES, "big", signed=True)
"""In the place of a number: the end of a replay."""
_MEDIUM = "GPU"
"""vLLM's name for the memory that the engine computes in, on any device."""

_Event: TypeAlias = dict[str, Any]
"""A map of fields as vLLM names them; the tag is `type`."""
_Batch: TypeAlias = tuple[int, float, list[_Event]]
"""Its number, Unix time, events."""

_log = get_logger(__name__)


class KvEvents:
    """A `CacheListener`. Use as a context manager around the loop's work, on the loop."""

    def __init__(self, config: WorkerConfig, unix_time: Callable[[], float] = time.time) -> None:
        self._config = config
        self._unix_time = unix_time
        self._events: list[_Event] = []
        """Events of this turn of the loop."""
        self._num_batches = 0
        self._queue: deque[_Batch | None] = deque(maxlen=MAX_QUEUED)
        """None = end."""
        self._kept: deque[tuple[bytes, bytes]] = deque()
        """Number and payload, the oldest first."""
        self._num_kept_bytes = 0
        self._context = zmq.Context()
        self._wake = os.eventfd(0)
        """Counts what the thread has not looked at; ZeroMQ's sockets may not be shared between threads."""
        self._publisher, self._replays = self._context.socket(zmq.PUB), self._context.socket(zmq.ROUTER)
        self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)

    @property
    def addresses(self) -> tuple[str, ...]:
        """Returns where events are published, and where replays are asked for, if anywhere."""
        bound = (self._publisher, self._replays)[: len(self._config.kv_events)]
        return tuple(each.getsockopt_string(zmq.LAST_ENDPOINT) for each in bound)

    @property
    def _has_replays(self) -> bool:
        return len(self._config.kv_events) > 1

    def __enter__(self) -> KvEvents:
        """Raises ConfigError if an address is in use, or if there are more than two."""
        self._publisher.set_hwm(MAX_UNREAD)
        self._replays.set_hwm(MAX_KEPT + 1)
        self._replays.setsockopt(zmq.ROUTER_MANDATORY, 1)
        try:
            if len(self._config.kv_events) > 2:
                raise ConfigError("--kv-events", "takes one address for events and one for replays, no more")
            for socket, address in zip((self._publisher, self._replays), self._config.kv_events, strict=False):
                _bind(socket, address)
        except ConfigError:
            self._close()
            raise
        self._thread.start()
        return self

    def __exit__(
        self, _: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._end_batch()
        self._enqueue(None)
        self._thread.join()
        self._close()

    def _close(self) -> None:
        self._context.destroy(linger=0)
        os.close(self._wake)

    # --- on the loop, from the cache (CacheListener) ---

    def stored(
        self, cache_salt: str, parent_hash: int | None, hashes: Sequence[int], token_ids: Sequence[TokenId]
    ) -> None:
        """See `engine.prefix_cache.CacheListener`."""
        event: _Event = {
            "type": "BlockStored",
            "block_hashes": list(hashes),
            "parent_block_hash": parent_hash,
            "token_ids": list(token_ids),
            "block_size": self._config.block_size,
            "lora_id": None,
            "medium": _MEDIUM,
            "lora_name": None,
        }
        if cache_salt and parent_hash is None:
            event["extra_keys"] = [[cache_salt], *[None] * (len(hashes) - 1)]
        self._add(event)

    def removed(self, hashes: Sequence[int]) -> None:
        """See `engine.prefix_cache.CacheListener`."""
        self._add({"type": "BlockRemoved", "block_hashes": list(hashes), "medium": _MEDIUM})

    def cleared(self) -> None:
        """See `engine.prefix_cache.CacheListener`."""
        self._add({"type": "AllBlocksCleared"})

    def _add(self, event: _Event) -> None:
        if not self._events:
            asyncio.get_running_loop().call_soon(self._end_batch)
        self._events.append(event)

    def _end_batch(self) -> None:
        """A no-op if the end came before this turn's."""
        if not self._events:
            return
        events, self._events = self._events, []
        number, self._num_batches = self._num_batches, self._num_batches + 1
        self._enqueue((number, self._unix_time(), events))

    def _enqueue(self, batch: _Batch | None) -> None:
        self._queue.append(batch)
        os.eventfd_write(self._wake, 1)

    # --- on the thread ---

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._wake, zmq.POLLIN)
        if self._has_replays:
            poller.register(self._replays, zmq.POLLIN)
        while True:
            for socket, _ in poller.poll():
                if socket is self._replays:
                    self._replay(self._replays.recv_multipart())
                    continue
                os.eventfd_read(self._wake)
                while self._queue:
                    batch = self._queue.popleft()
                    if batch is None:
                        return
                    self._publish(batch)

    def _publish(self, batch: _Batch) -> None:
        number, unix_time, events = batch
        sequence = number.to_bytes(_NUMBER_BYTES, "big")
        payload: bytes = msgpack.packb([unix_time, events, 0])  # 0: the rank among data parallel engines
        self._publisher.send_multipart([self._config.kv_events_topic.encode(), sequence, payload], zmq.NOBLOCK)
        if not self._has_replays:
            return
        self._kept.append((sequence, payload))
        self._num_kept_bytes += len(payload)
        while len(self._kept) > MAX_KEPT or self._num_kept_bytes > MAX_KEPT_BYTES:
            self._num_kept_bytes -= len(self._kept.popleft()[1])

    def _replay(self, request: list[bytes]) -> None:
        """All batches kept from a number on, then the end; less to a peer that does not read."""
        *envelope, first = request
        if len(first) != _NUMBER_BYTES:
            _log.warning("not a request for a replay of KV events", num_bytes=len(first))
            return
        try:
            for sequence, payload in self._kept:
                if sequence >= first:
                    self._replays.send_multipart([*envelope, sequence, payload], zmq.NOBLOCK)
            self._replays.send_multipart([*envelope, _END, b""], zmq.NOBLOCK)
        except zmq.ZMQError as error:  # its queue is full, or it is gone
            _log.warning("a replay of KV events was cut short", error=str(error))


def _bind(socket: zmq.Socket[bytes], address: str) -> None:
    socket.setsockopt(zmq.IPV6, int("[" in address))
    socket.setsockopt(zmq.MAXMSGSIZE, _MAX_RECEIVED_BYTES)
    try:
        socket.bind(address)
    except zmq.ZMQError as error:
        raise ConfigError("--kv-events", f"{error} (got {address!r})") from error
