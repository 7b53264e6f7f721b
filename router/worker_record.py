"""What a router knows of one worker: its last load, what it was given since, and why it takes no new work."""

from __future__ import annotations

from router.ejection import Ejections
from router.fleet import Room
from router.prefix_map import Prefix, PrefixMap
from router.worker_link import WorkerLink
from router.worker_view import Obstacle, WorkerView
from tandem.errors import InvalidRequest, Reason, Unavailable
from tandem.types import Incarnation, WorkerInfo, WorkerLoad

_REMEMBERED_INCARNATIONS = 64


class WorkerRecord:
    """Record of one life of a worker; kept by `Workers`."""

    def __init__(self, info: WorkerInfo, now_s: float, owner: str, replaced: tuple[Incarnation, ...]) -> None:
        self.info = info
        self.number = 0
        """In its router's fleet."""
        self.owner = owner
        self.replaced = replaced[-_REMEMBERED_INCARNATIONS:]
        """Earlier incarnations, which stay out as long as this life lasts."""
        self.load: WorkerLoad | None = None
        self.heard_s = now_s
        self.moved_s = now_s
        self.assigned_tokens = 0
        """Tokens given to the worker that `load` does not show."""
        self.assigned_seqs = 0
        self.assigned_prompt_tokens = 0
        """Tokens among these that the worker computes itself."""
        self.coming_tokens = 0
        """Tokens among these that are still with the prefill worker: the next heartbeat will not show them either."""
        self.coming_seqs = 0
        self.ended_seqs = 0
        """Since `load`, which shows most of them still: not those that began after it."""
        self.set_apart = False
        """Whether the log says that its set gets no new requests."""
        self.drain_ordered = False
        self.link: WorkerLink | None = None
        """None = stalled."""

    @property
    def connected(self) -> bool:
        """Whether this router's stream to the worker is open."""
        return self.link is not None and self.link.connected

    @property
    def block_size(self) -> int | None:
        """Block size of the worker's pool; None = unknown, as before the first heartbeat."""
        return None if self.load is None else self.load.pool.block_size or None

    @property
    def room(self) -> Room:
        """How much the worker can hold."""
        return Room(self.info.max_sequence_tokens, self.info.pool_tokens, self.block_size or 0, self.info.max_seqs)

    @property
    def held(self) -> PrefixMap | None:
        """Holdings of the worker's cache; None if the worker does not report them."""
        return self.link.held if self.link is not None and self.link.held.tells else None

    def check_claim(self, info: WorkerInfo, owner: str) -> None:
        """Raises Unavailable if its name is not to be had by `info`, which says that it is its own."""
        if owner != self.owner:
            raise Unavailable(f"worker {info.worker_id} is registered by another identity", Reason.WORKER_ID_TAKEN)
        if info.incarnation in self.replaced:
            raise Unavailable(f"a newer incarnation of {info.worker_id} is registered", Reason.WORKER_ID_TAKEN)

    def take_load(self, load: WorkerLoad, now_s: float) -> None:
        """A heartbeat came."""
        moved = self.load is None or load.engine_steps != self.load.engine_steps or load.running_seqs == 0
        self.moved_s = now_s if moved else self.moved_s
        self.load = load
        self.heard_s = now_s
        self.assigned_tokens, self.assigned_seqs = self.coming_tokens, self.coming_seqs
        self.assigned_prompt_tokens = self.ended_seqs = 0

    def forgive(self, seconds: float, now_s: float) -> None:
        """Does not count so much time as silence of the worker."""
        self.heard_s = min(now_s, self.heard_s + seconds)
        self.moved_s = min(now_s, self.moved_s + seconds)

    def obstacle(self) -> Obstacle | None:
        """Reason why the worker takes no new work."""
        if self.link is None:
            return Obstacle.STALLED
        if not self.link.connected:
            return Obstacle.NOT_CONNECTED
        if self.load is None:
            return Obstacle.NOT_HEARD
        if self.drain_ordered or self.load.draining:
            return Obstacle.DRAINING
        return None

    def expect(self, prefix: Prefix, likely_tokens: int, now_s: float) -> None:
        """It was given a request that begins so, and will hold all of it; `likely_tokens`: as its view had them."""
        if self.held is not None and self.block_size is not None:
            self.held.expect(prefix.hashes(self.block_size)[likely_tokens // self.block_size :], now_s)

    def view(self, now_s: float, ejections: Ejections, prefix: Prefix | None = None) -> WorkerView:
        """Returns the view for placing a request that begins with `prefix`."""
        reported_tokens = likely_tokens = 0
        if prefix is not None and self.held is not None and self.block_size is not None:
            hashes, most_tokens = prefix.hashes(self.block_size), prefix.most_tokens(self.block_size)
            num_reported = self.held.num_reported(hashes)
            num_likely = self.held.num_likely(hashes, num_reported, now_s)
            reported_tokens = min(most_tokens, self.block_size * num_reported)
            likely_tokens = min(most_tokens, self.block_size * num_likely)
        return WorkerView(
            self.info,
            self.load,
            self.obstacle(),
            self.assigned_tokens,
            self.assigned_seqs,
            ejections.burden(self.info.incarnation, now_s),
            ejections.describe(self.info.incarnation, now_s),
            now_s - self.heard_s,
            self.connected,
            reported_tokens,
            likely_tokens,
            self.assigned_prompt_tokens,
            self.ended_seqs,
        )


def check_complete(info: WorkerInfo) -> None:
    """Raises InvalidRequest that names what is missing."""
    for name in ("worker_id", "incarnation", "address", "model_fingerprint", "layout_fingerprint"):
        if not getattr(info, name):
            raise InvalidRequest(f"info.{name}", "must not be empty")
    if info.max_sequence_tokens < 1:
        raise InvalidRequest("info.max_sequence_tokens", "must be positive")
