"""The words all rooms speak: ids, sampling parameters, sequences, token deltas.

Plain frozen data. Knows nothing of protobuf (see `convert`), sockets or tensors.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple, NewType, TypeAlias

from tandem.decision import Decision
from tandem.str_enum import StrEnum

if TYPE_CHECKING:
    from tandem.token_ids import TokenIds

RequestId = NewType("RequestId", str)
"""What the client calls its request; echoed everywhere."""
Handle = NewType("Handle", int)
"""Names one request, with all its choices, on one router-worker stream; never used twice there."""
WorkerId = NewType("WorkerId", str)
"""Stable name of a worker."""
Incarnation = NewType("Incarnation", str)
"""Id of one life of a process: 32 hex digits drawn at start."""
BlockId = NewType("BlockId", int)
"""Physical index of a KV block in its pool."""
TokenId = NewType("TokenId", int)
"""Index into the vocabulary."""

_SEED_MASK = 2**64 - 1


def new_incarnation() -> Incarnation:
    """Drawn at random."""
    return Incarnation(secrets.token_hex(16))


class Role(StrEnum):
    """What a worker does."""

    PREFILL = "prefill"
    DECODE = "decode"
    ELASTIC = "elastic"

    @property
    def prefills(self) -> bool:
        """Whether the role computes prompts for other workers."""
        return self is not Role.DECODE

    @property
    def decodes(self) -> bool:
        """Whether the role owns a pool that sequences decode in."""
        return self is not Role.PREFILL


class FinishReason(StrEnum):
    """Why a choice ended."""

    STOP = "stop"
    LENGTH = "length"


class WaitReason(StrEnum):
    """What a request waits for that a worker holds and makes no tokens of. See worker.proto for each."""

    PREFILL_LINE = "prefill_line"
    PROMPT = "prompt"
    GRANT = "grant"
    HANDOFF = "handoff"
    ROOM = "room"
    SEAT = "seat"
    PREEMPTED = "preempted"
    SEARCH = "search"


class EarlyStopping(StrEnum):
    """When a beam search stops; as transformers' early_stopping False, True and "never"."""

    HEURISTIC = "heuristic"
    ALWAYS = "always"
    NEVER = "never"


class Language(StrEnum):
    """How a constraint says what may be written; named as the fields of inference.proto."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    GRAMMAR = "grammar"
    CHOICE = "choice"


@dataclass(frozen=True, slots=True)
class Constraint:
    """What the output is restricted to."""

    language: Language
    texts: tuple[str, ...]
    """Texts of the constraint: several for CHOICE, otherwise a single text."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is chosen; nothing left open. See inference.proto for each field.

    `end_token_ids` are the ids that end the sequence when sampled: end-of-text (unless
    ignored) and the caller's stop ids. `min_tokens` masks exactly these.
    """

    max_tokens: int
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int = 0
    end_token_ids: frozenset[TokenId] = frozenset()
    logprobs: int | None = None
    logit_bias: Mapping[TokenId, float] = field(default_factory=dict)
    beam_width: int = 0
    """0 = tokens are drawn; else at least 2, and the request's choices are the best of so many beams."""
    length_penalty: float = 1.0
    early_stopping: EarlyStopping = EarlyStopping.HEURISTIC
    prompt_logprobs: int | None = None
    constraint: Constraint | None = None

    def of_choice(self, index: int) -> SamplingParams:
        """Returns the parameters with the seed of a choice."""
        return self if index == 0 else replace(self, seed=(self.seed + index) & _SEED_MASK)


@dataclass(frozen=True, slots=True)
class TextParams:
    """How tokens become text; used by the router only."""

    stop: tuple[str, ...] = ()
    include_stop: bool = False
    skip_special_tokens: bool = True
    stop_token_ids: frozenset[TokenId] = frozenset()
    """The caller's own stop ids, to be reported as `matched_stop`."""


@dataclass(frozen=True, slots=True)
class ChoiceSpec:
    """A choice of a request that must still be completed."""

    index: int
    output_token_ids: tuple[TokenId, ...] = ()
    """Tokens emitted already, when the request is resumed; the next token drawn is number `len` of them."""


@dataclass(frozen=True, slots=True)
class GroupSpec:
    """One request as a worker runs it: a prompt, and one or more choices that continue it.

    Choice i draws with `sampling.seed + i`: it equals a request of its own with that seed.
    """

    request_id: RequestId
    prompt_token_ids: tuple[TokenId, ...] | TokenIds
    sampling: SamplingParams
    choices: tuple[ChoiceSpec, ...] = (ChoiceSpec(0),)
    timeout_s: float | None = None
    priority: int = 0
    traceparent: str = ""
    tracestate: str = ""
    cache_salt: str = ""
    """KV is shared with requests of the same salt only."""

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens that the caller gave."""
        return len(self.prompt_token_ids)

    @property
    def prefix_token_ids(self) -> tuple[TokenId, ...] | TokenIds:
        """What is computed once for all choices: the prompt, and the output of a choice that is alone."""
        if len(self.choices) == 1:
            output_token_ids = self.choices[0].output_token_ids
            return self.prompt_token_ids + output_token_ids if output_token_ids else self.prompt_token_ids
        return self.prompt_token_ids

    @property
    def reads_cache(self) -> bool:
        """Whether its prompt's KV may be taken from a cache: not if log-probabilities of all its tokens are wanted."""
        return self.sampling.prompt_logprobs is None

    @property
    def num_first_tokens(self) -> int:
        """Choices that draw from the prefix's last token; of several, those that are resumed do not."""
        return 1 if len(self.choices) == 1 else sum(not choice.output_token_ids for choice in self.choices)

    @property
    def max_total_tokens(self) -> int:
        """Most tokens of a choice, prompt and completion together."""
        return self.num_prompt_tokens + self.sampling.max_tokens

    @property
    def num_seqs(self) -> int:
        """Sequences that run for it at most: its choices, or the beams of its search."""
        return self.sampling.beam_width or len(self.choices)

    @property
    def seqs_option(self) -> str:
        """The option that says how many, for refusals."""
        return "beam_width" if self.sampling.beam_width else "n"

    def max_pool_tokens(self, block_size: int) -> int:
        """Token slots that the whole group can come to need in one pool: the prompt's full blocks are shared."""
        shared = self.num_prompt_tokens // block_size
        own = -(-self.max_total_tokens // block_size) - shared
        return (shared + own * self.num_seqs) * block_size


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural-log probabilities at a position, before temperature and filters."""

    token_id: TokenId
    logprob: float
    top: tuple[tuple[TokenId, float], ...] = ()


Candidates: TypeAlias = tuple[tuple[TokenId, float], ...]
"""The best next tokens of a beam with their log-probabilities, as penalties and biases leave them; best first."""


class TokenDelta(NamedTuple):
    """Tokens `offset, offset+1, …` of one choice's completion. `logprobs` is empty or one per token.

    A tuple, since one is made for each token that a router passes on: a frozen dataclass takes four times as long.
    """

    offset: int
    token_ids: tuple[TokenId, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
    index: int = 0  # type: ignore[assignment]  # in place of a method that nobody calls
    """Which choice."""
    score: float | None = None
    """Score of a choice that a beam search found."""

    @property
    def end(self) -> int:
        """Offset of the token after the last token of the delta."""
        return self.offset + len(self.token_ids)


class PrefixAt(StrEnum):
    """Where KV of a request's first tokens seems to be when it is placed."""

    CHOSEN = "chosen"
    """On a worker chosen for the prefix."""
    ELSEWHERE = "elsewhere"
    """Only on others, which were passed over for their load or for other reasons."""
    NOWHERE = "nowhere"


class MoveReason(StrEnum):
    """Why a decode worker hands a running request over."""

    DRAIN = "drain"
    OVERLOAD = "overload"


class PlacementReason(StrEnum):
    """Why a prompt is computed on this worker."""

    LOCAL_STATIC = "local_static"
    """The decode worker computes every prompt: that is its fixed part."""
    LOCAL_SHORT = "local_short"
    """The prompt is no longer than what the decode worker always computes itself."""
    LOCAL_HELD = "local_held"
    """The decode worker holds nearly all of its KV."""
    LOCAL_FASTER = "local_faster"
    """It is elastic, and no pair costs less than the worker that decodes it alone."""
    LOCAL_FALLBACK = "local_fallback"
    """No prefill worker is ready; the decode worker does its work."""
    REMOTE_STATIC = "remote_static"
    """The decode worker computes no such prompts."""
    REMOTE_FASTER = "remote_faster"
    """Of the pairs of this elastic decode worker and another one that computes it, one costs least of all."""
    MOVED = "handed_over"
    """The prompt's KV is on another decode worker, which moves the running request."""


@dataclass(frozen=True, slots=True)
class PoolCounts:
    """Blocks of one pool by state, and the waste. `free + … + quarantined + cached == total`."""

    total: int
    free: int
    reserved: int
    receiving: int
    live: int
    quarantined: int
    block_size: int
    unused_slots: int
    """Token slots of live blocks that hold no token."""
    cached: int = 0
    """Nobody's, but their content is known: evicted when blocks run out."""

    @property
    def num_used(self) -> int:
        """Blocks that are neither free nor cached."""
        return self.total - self.free - self.cached


@dataclass(frozen=True, slots=True)
class KvRoute:
    """How the KV of a hand-off travelled."""

    transport: str = ""
    """Empty = not known."""
    passed_over: str = ""
    """Transports that come before it, and why they were passed over."""


UNKNOWN_ROUTE = KvRoute()


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """What does not change during one life of a worker. See registry.proto for each field."""

    worker_id: WorkerId
    incarnation: Incarnation
    role: Role
    address: str
    model: str
    config_fingerprint: str
    model_fingerprint: str
    layout_fingerprint: str
    transports: tuple[str, ...]
    local_prefill_tokens: int | None
    """Where it decodes: longest prompt that it computes for itself; None = any length; 0 = none."""
    max_sequence_tokens: int
    pid: int
    device: str
    admin_address: str = ""
    """HOST:PORT of the worker's admin port; empty without an admin port."""
    pool_tokens: int = 0
    """Token slots of its pool, which all choices of a request must fit into together; 0 = not known."""
    max_seqs: int = 0
    """Sequences in its batch at most; 0 = not known."""
    decisions: tuple[Decision, ...] = ()
    """What it chose by itself at start."""


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """How a worker fares now. See registry.proto for each field."""

    engine_steps: int
    running_seqs: int
    waiting_seqs: int
    queued_prompt_tokens: int
    pool: PoolCounts
    live_transfers: int
    draining: bool
    preemptions: int = 0
    prompt_tokens_per_s: float = 0.0
    """Prompt tokens that it computes per second as things are now; 0 = not measured yet."""
    step_s: float = 0.0
    """Moving average of its decode steps; 0 = none yet."""
    step_objective_s: float = 0.0
    """Longest step that its inter-token objective allows while sequences decode; 0 = none."""
    running_for_others: int = 0
    """Prompts among `running_seqs` that the worker computes for other workers."""
    waiting_for_others: int = 0
    """The same of `waiting_seqs`."""
    steps_per_s: float = 0.0
    chunk_tokens: int = 0
    """Most prompt tokens of its next step, beside what decodes now."""
    device_used_bytes: int = 0
    """Memory of its GPU that is taken; 0 = it has no GPU."""
    device_total_bytes: int = 0
