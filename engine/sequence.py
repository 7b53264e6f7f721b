"""One choice's running state: its tokens, how far their KV is, and the blocks that hold it.

    known     tokens on the host: prompt and completion
    pending   drawn by launched steps whose results have not been seen
    computed  tokens whose KV lies in the blocks once every launched step has ended

    ├──────────── known ───────────┤── pending ──┤
    ├──────────── computed ────────────────┤ remaining

`schedule` moves computed and pending on as a chunk is launched, `schedule_newest` as a row is; `append_token` turns a
pending token into a known one; `roll_back` undoes what a launched step computed for nothing. It decides nothing:
the worker's scheduler calls it, and releases what `take_blocks` returns.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, MutableSequence
from collections.abc import Sequence as SequenceOf
from dataclasses import replace
from typing import TypeAlias, cast

from engine.beam import num_candidates
from engine.draws import SampleSpec
from engine.guides import Guide
from engine.history import Ints, TokenHistory
from engine.penalties import fixed_changes, penalised_ids, reads_output
from engine.prompt_scores import PromptScores
from engine.step import ScheduledSeq
from tandem.errors import InternalError
from tandem.token_ids import TokenIds
from tandem.types import BlockId, FinishReason, SamplingParams, TokenId

BlockTable: TypeAlias = MutableSequence[BlockId]
"""An `array` of C ints: a step's batch copies it in one go."""


def new_block_table(blocks: SequenceOf[BlockId] = ()) -> BlockTable:
    """A table of these blocks."""
    return cast("BlockTable", blocks[:] if isinstance(blocks, array) else array("i", blocks))


TokenArray: TypeAlias = MutableSequence[TokenId]
"""An `array` of C unsigned ints: a cache compares it in one go."""


def new_token_array(token_ids: SequenceOf[TokenId]) -> TokenArray:
    """Returns an array of these tokens; an array comes back unchanged."""
    if isinstance(token_ids, TokenIds):
        token_ids = cast("SequenceOf[TokenId]", token_ids.as_array)
    return cast("TokenArray", token_ids if isinstance(token_ids, array) else array("I", token_ids))


class Sequence:
    """Starts with nothing computed and no blocks."""

    def __init__(
        self,
        index: int,
        params: SamplingParams,
        prompt_token_ids: SequenceOf[TokenId],
        output_token_ids: Iterable[TokenId] = (),
        prompt_ids: Ints | None = None,
    ) -> None:
        """`params` with the choice's own seed; a prompt in an `array` is shared with other choices, not copied.

        `prompt_ids`: the prompt's `penalised_ids` by these params, if they are known already.
        """
        if not prompt_token_ids:
            raise InternalError("a sequence without a prompt")
        self.index = index
        self.params = params
        self.drawers: tuple[Sequence, ...] = (self,)
        """Choices that draw from its last token: itself, or those that are about to fork from it."""
        self.block_table = new_block_table()
        self.num_candidates = num_candidates(params) if params.beam_width else 0
        """Candidates of each draw: 0 = a single token is drawn; else the sequence is a beam that takes this many best
        tokens."""
        self.runs_ahead = not params.beam_width
        """Whether a step may be launched for it while its last token is pending; False where the host must know the
        token first, as for a token mask: it takes no part in that step."""
        self.guide: Guide | None = None
        """The sequence's place in its grammar; see `follow`."""
        self._prompt_token_ids = new_token_array(prompt_token_ids)
        self._output_token_ids = list(output_token_ids)
        self.num_pending_tokens = 0
        """Tokens drawn by launched steps that have not been seen."""
        self.num_tokens = len(prompt_token_ids) + len(self._output_token_ids)
        """Known and pending tokens."""
        self.num_computed_tokens = 0
        """Tokens whose KV lies in the blocks once every launched step has ended."""
        self.num_ended_tokens = 0
        """How many of the computed tokens lie there now: no step that computes these is in flight, or may still fail.
        """
        self.num_cached_tokens = 0
        """How many of the computed tokens a cache had when the sequence last began."""
        self.prompt_scores: PromptScores | None = None
        """Given if the log-probabilities of its prompt are to be sent from here."""
        self.finish_reason: FinishReason | None = None
        """Set once the completion has ended."""
        self._fixed = fixed_changes(params)
        self._history: TokenHistory | None = None
        if reads_output(params):
            seen = penalised_ids(prompt_token_ids, params) if prompt_ids is None else prompt_ids
            self._history = TokenHistory(seen, self._output_token_ids)

    @property
    def token_ids(self) -> TokenArray:
        """Known tokens, prompt and completion; not to be changed, since they may be the prompt's own."""
        if not self._output_token_ids:
            return self._prompt_token_ids
        token_ids = self._prompt_token_ids[:]
        token_ids.extend(new_token_array(self._output_token_ids))
        return token_ids

    @property
    def output_token_ids(self) -> tuple[TokenId, ...]:
        """Known completion tokens, tokens drawn elsewhere included; a copy."""
        return tuple(self._output_token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Known completion tokens, tokens drawn elsewhere included."""
        return len(self._output_token_ids)

    @property
    def num_remaining_tokens(self) -> int:
        """Tokens whose KV must be computed before the next token can be drawn."""
        return self.num_tokens - self.num_computed_tokens

    @property
    def is_computed(self) -> bool:
        """Whether KV of all known tokens lies in the blocks: no step in flight computes it."""
        return self.num_ended_tokens >= self.num_tokens - self.num_pending_tokens

    @property
    def is_finished(self) -> bool:
        """Whether nothing more will be drawn."""
        return self.finish_reason is not None

    @property
    def is_exhausted(self) -> bool:
        """Whether known and pending tokens are all that may be drawn: no further step is of use."""
        num_output_tokens = self.num_tokens - len(self._prompt_token_ids)
        return self.finish_reason is not None or num_output_tokens >= self.params.max_tokens

    @property
    def awaits_mask(self) -> bool:
        """Whether it cannot draw yet: which tokens may follow the last one is being found out."""
        return self.guide is not None and self.guide.mask is None

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens before the completion."""
        return len(self._prompt_token_ids)

    def draw_spec(self, output_index: int) -> SampleSpec:
        """Returns its draw of that number, the next one or the one behind a pending token."""
        params, mask = self.params, None
        if self.guide is not None:
            mask = self.guide.mask
            if output_index < params.min_tokens and self.guide.leaves_only(params.end_token_ids):
                params = replace(params, min_tokens=0)  # the grammar allows nothing but an end
        # By place, and so in half the time: it is done for each seq in each step.
        return SampleSpec(params, output_index, self._history, self.num_candidates, mask, self._fixed)

    def blocks_wanted(self, num_tokens: int, block_size: int) -> int:
        """Blocks to add before `num_tokens` more tokens can be computed; copies on write not counted."""
        num_blocks = -(-(self.num_computed_tokens + num_tokens) // block_size) - len(self.block_table)
        return num_blocks if num_blocks > 0 else 0

    def follow(self, guide: Guide) -> None:
        """From now on it draws only what `guide`, which stands behind its tokens, allows."""
        self.guide, self.runs_ahead = guide, False

    def add_blocks(self, blocks: SequenceOf[BlockId]) -> None:
        """Takes over the caller's hold on these blocks."""
        self.block_table.extend(new_block_table(blocks))  # from an array it is a copy of memory

    def reuse(self, blocks: SequenceOf[BlockId], block_size: int) -> BlockTable:
        """Takes over the caller's hold on full blocks, found in a cache, that hold the tokens behind its full blocks.

        Returns what they replace, for the caller to release: its last block, if that is not full.
        """
        num_full = self.num_computed_tokens // block_size
        replaced, num_tokens = self.block_table[num_full:], (num_full + len(blocks)) * block_size
        if not self.num_computed_tokens <= num_tokens < self.num_tokens:
            raise InternalError(f"{num_tokens} cached tokens behind {self.num_computed_tokens} of {self.num_tokens}")
        self.block_table[num_full:] = new_block_table(blocks)
        self.num_cached_tokens += num_tokens - self.num_computed_tokens
        self.advance(num_tokens - self.num_computed_tokens)
        return replaced

    def take_blocks(self) -> BlockTable:
        """Hands every block back to the caller, who releases them; nothing is computed any more.

        Later the seq can start again from its tokens, which it keeps: preemption by recompute.
        """
        blocks, self.block_table = self.block_table, new_block_table()
        self.num_computed_tokens = self.num_ended_tokens = self.num_cached_tokens = 0
        return blocks

    def schedule(self, num_tokens: int) -> ScheduledSeq:
        """Returns its chunk of a step about to be launched: its next tokens, and the draws if they are the last ones.

        Moves `num_computed_tokens` on, and the drawers' `num_pending_tokens`.
        """
        start, end = self.num_computed_tokens, self.num_computed_tokens + num_tokens
        num_known = self.num_tokens - self.num_pending_tokens
        if self.finish_reason is not None or not start < end <= num_known:
            raise InternalError(f"tokens {start}..{end} of {num_known} scheduled")
        token_ids = self._tokens(start, end)
        samples = tuple([each._draw() for each in self.drawers]) if end == self.num_tokens else ()
        scored = None if self.prompt_scores is None else self.prompt_scores.of_chunk(start, end)
        self.num_computed_tokens = end
        return ScheduledSeq(token_ids, start, self.block_table, samples, scored)

    def schedule_newest(self) -> TokenId:
        """Moves it on as `schedule` of its newest token does, for a row; returns that, or the known one before it."""
        self.num_computed_tokens += 1
        self.num_pending_tokens += 1
        self.num_tokens += 1
        return self._output_token_ids[-1]

    def twin(self) -> Sequence:
        """Another one with the same known tokens, at the same place of its grammar; nothing of it is computed."""
        prompt_ids = None if self._history is None else self._history.prompt_ids
        twin = Sequence(self.index, self.params, self._prompt_token_ids, self._output_token_ids, prompt_ids)
        if self.guide is not None:
            twin.follow(self.guide.fork())
        return twin

    def advance(self, num_tokens: int) -> None:
        """KV of `num_tokens` more tokens lies in the blocks: received, or shared at a fork."""
        if self.num_computed_tokens + num_tokens > self.num_tokens:
            raise InternalError(f"computed beyond its {self.num_tokens} tokens")
        self.num_computed_tokens += num_tokens
        self.num_ended_tokens = self.num_computed_tokens

    def step_ended(self, scheduled: ScheduledSeq) -> None:
        """Its share of a step was computed: the KV of those tokens lies in the blocks."""
        self.num_ended_tokens = scheduled.context_len + len(scheduled.token_ids)

    def roll_back(self, num_tokens: int, num_pending_tokens: int = 0) -> None:
        """Forgets the last computed tokens and pending draws: their step is of no use. Blocks stay held."""
        if num_tokens > self.num_computed_tokens or num_pending_tokens > self.num_pending_tokens:
            raise InternalError(f"{num_tokens} of {self.num_computed_tokens} computed tokens rolled back")
        self.num_computed_tokens -= num_tokens
        self.num_ended_tokens = min(self.num_ended_tokens, self.num_computed_tokens)
        self.num_pending_tokens -= num_pending_tokens
        self.num_tokens -= num_pending_tokens

    def append_token(self, token_id: TokenId) -> FinishReason | None:
        """Adds a drawn token, pending or brought; returns why the completion ends with it, if it does."""
        if self.finish_reason is not None:
            raise InternalError("a token after the completion's end")
        if self.num_pending_tokens:
            self.num_pending_tokens -= 1
        else:
            self.num_tokens += 1
        self._output_token_ids.append(token_id)
        if self._history is not None:
            self._history.append(token_id)
        if token_id in self.params.end_token_ids:
            self.finish_reason = FinishReason.STOP
        elif len(self._output_token_ids) >= self.params.max_tokens:
            self.finish_reason = FinishReason.LENGTH
        elif self.guide is not None:
            self.guide.append(token_id)
        return self.finish_reason

    def append_decoded(self, token_id: TokenId) -> FinishReason | None:
        """As `step_ended` of a step that computed its newest token, and `append_token` of what that drew."""
        self.num_ended_tokens += 1
        if not self.num_pending_tokens or self._history is not None or self.guide is not None:
            return self.append_token(token_id)
        params, output = self.params, self._output_token_ids
        self.num_pending_tokens -= 1
        output.append(token_id)
        if token_id in params.end_token_ids or len(output) >= params.max_tokens:
            self.finish_reason = FinishReason.STOP if token_id in params.end_token_ids else FinishReason.LENGTH
        return self.finish_reason

    def _draw(self) -> SampleSpec:
        """Returns its next draw; the token is pending from now on."""
        spec = self.draw_spec(self.num_tokens - len(self._prompt_token_ids))
        self.num_pending_tokens += 1
        self.num_tokens += 1
        return spec

    def _tokens(self, start: int, end: int) -> tuple[TokenId, ...]:
        num_prompt = len(self._prompt_token_ids)
        if start >= num_prompt:
            return tuple(self._output_token_ids[start - num_prompt : end - num_prompt])
        head = tuple(self._prompt_token_ids[start:end])
        return head if end <= num_prompt else head + tuple(self._output_token_ids[: end - num_prompt])
