"""One router's stream as a worker sees it: says things to the router, never waits for it."""

from __future__ import annotations

from collections.abc import Iterable

from tandem.convert import delta_to_proto, failed_to_proto
from tandem.errors import TandemError
from tandem.types import Handle, Incarnation, TokenDelta
from tandem.v1 import worker_pb2
from worker.outbox import Outbox


class RouterSession:
    """Handed to the worker with every request of this router.

    What is said of a handle that was released, or has failed, goes nowhere: late words are no-ops.
    """

    def __init__(self, router_incarnation: Incarnation) -> None:
        self.router_incarnation = router_incarnation
        self._outbox = Outbox()
        self._open: set[Handle] = set()

    @property
    def outbox(self) -> Outbox:
        """Emptied by the stream's writer."""
        return self._outbox

    def reserved(self, handle: Handle, ticket: bytes = b"", kv_endpoint: bytes = b"") -> None:
        """Room was made; both empty where the decode worker computes the prompt itself."""
        message = worker_pb2.Reserved(handle=handle, ticket=ticket, kv_endpoint=kv_endpoint)
        self._answer(handle, worker_pb2.ConnectResponse(reserved=message))

    def prefill_done(self, handle: Handle, delta: TokenDelta, queue_s: float, prefill_s: float) -> None:
        """The first token is known; the hand-off may still run."""
        message = worker_pb2.PrefillDone(
            handle=handle, output=delta_to_proto(handle, delta), queue_seconds=queue_s, prefill_seconds=prefill_s
        )
        self._answer(handle, worker_pb2.ConnectResponse(prefill_done=message))

    def handoff_done(self, handle: Handle, num_bytes: int, seconds: float) -> None:
        """The decode worker has attached every block."""
        message = worker_pb2.HandoffDone(handle=handle, transfer_bytes=num_bytes, transfer_seconds=seconds)
        self._answer(handle, worker_pb2.ConnectResponse(handoff_done=message))

    def deltas(self, deltas: Iterable[tuple[Handle, TokenDelta]]) -> None:
        """What one step made for this router."""
        for handle, delta in deltas:
            if handle in self._open:
                self._outbox.add_delta(handle, delta)

    def failed(self, handle: Handle, error: TandemError) -> None:
        """The sequence ended without all its tokens, and whatever it held is let go. Its last word."""
        if handle in self._open:
            self._open.discard(handle)
            self._outbox.add_failed(handle, failed_to_proto(handle, error))

    def open_handle(self, handle: Handle) -> bool:
        """A new sequence; False if the handle is in use."""
        if handle in self._open:
            return False
        self._open.add(handle)
        return True

    def close_handle(self, handle: Handle) -> None:
        """The router wants nothing more of it."""
        self._open.discard(handle)
        self._outbox.discard(handle)

    def _answer(self, handle: Handle, answer: worker_pb2.ConnectResponse) -> None:
        if handle in self._open:
            self._outbox.add_answer(handle, answer)
