"""A request that searches with beams: a group whose sequences are the beams that run now.

    prompt, one sequence ─ draw ─▶ up to W beams ─ draw, draw, … of all ─▶ W others ─▶ … ─▶ is_finished: `best(i)`

A beam draws candidates, not a token, and waits until all have drawn; then `BeamSearch` says who goes on. The first that
continues a beam takes over its blocks; every further one holds them too, and copies on write as choices do. Of a beam
that nobody continues, the blocks are given back. What has ended is kept as tokens and score, without blocks.

Preempted, the beams stay as tokens: what they have in common is computed once more, then the rest of each.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import replace
from itertools import takewhile

from engine.beam import BeamSearch, Hypothesis
from engine.block_pool import BlockPool
from engine.group import Group
from engine.sequence import BlockTable, Sequence
from engine.step import SampledToken
from tandem.errors import InternalError
from tandem.first_tokens import FirstTokens, NextTokens
from tandem.types import BlockId, Candidates, ChoiceSpec, GroupSpec


class BeamGroup(Group):
    """Starts with one beam that is its own prefix, with nothing computed and no blocks."""

    def __init__(self, spec: GroupSpec) -> None:
        super().__init__(replace(spec, choices=(ChoiceSpec(0),)))
        self.spec = spec
        self._search = BeamSearch(spec.sampling)
        self._drawn: dict[Sequence, Candidates] = {}
        """Draws of the beams that have drawn since all beams went on together."""

    @property
    def is_finished(self) -> bool:
        """Whether the search has ended."""
        return self._search.is_done

    @property
    def num_seats(self) -> int:
        """All that it may come to need, from the start: beams fork when there is no time to wait for a seat."""
        return 0 if self.is_finished else self.spec.num_seqs

    def best(self, index: int) -> Hypothesis:
        """What choice `index` is; only once finished."""
        return self._search.best(index)

    def draw(self, beam: Sequence, candidates: Candidates, pool: BlockPool) -> list[BlockTable]:
        """The best next tokens of one of the beams. With those of the last one, all go on, or the search ends.

        Hands back the blocks of beams that nobody continues, one table per beam, to be released.
        """
        self._drawn[beam] = candidates
        if len(self._drawn) < len(self.sequences):
            return []
        beams = self.sequences
        continuations = self._search.advance([self._drawn[each] for each in beams])
        self._forget_draws()
        if self.is_finished:
            return []
        not_continued_yet = {parent for parent, _ in continuations}
        going: list[Sequence] = []
        for parent, _ in continuations:
            is_first = parent in not_continued_yet
            not_continued_yet.discard(parent)
            going.append(beams[parent] if is_first else _twin(beams[parent], pool))
        for each, (_, token_id) in zip(going, continuations, strict=True):
            each.append_token(token_id)
        self.sequences = tuple(going)
        if self._alone:
            self._alone, self.is_forked = False, True
            self.prefix = self._new_prefix()
        kept = set(going)
        return [each.take_blocks() for each in beams if each not in kept]

    def land(self, blocks: SequenceOf[BlockId], first_tokens: FirstTokens, pool: BlockPool) -> None:
        """Takes over blocks into which the prompt's KV was received, with the first candidates; then forks.

        Raises InternalError if these are tokens; nothing has been taken over then.
        """
        if isinstance(first_tokens, Mapping | NextTokens):
            raise InternalError("first tokens, not candidates, of a beam search")
        self.prefix.add_blocks(blocks)
        self.prefix.advance(self.prefix.num_remaining_tokens)
        self.draw(self.prefix, first_tokens, pool)

    def take_blocks(self) -> list[BlockTable]:
        """See `Group.take_blocks`; beams that have drawn will draw again."""
        self._forget_draws()
        return super().take_blocks()

    def _forget_draws(self) -> None:
        self._drawn.clear()
        for each in self.sequences:
            each.roll_back(0, each.num_pending_tokens)

    def _new_prefix(self) -> Sequence:
        """What all beams have in common, but for the last token of each: it is they who draw."""
        outputs = zip(*[each.output_token_ids[:-1] for each in self.sequences], strict=True)
        common = [token_id for token_id, *_ in takewhile(lambda ids: len(set(ids)) == 1, outputs)]
        prefix = Sequence(-1, self.spec.sampling, self._prompt_token_ids, common, self._prompt_ids)
        prefix.drawers = ()
        return prefix


def new_group(spec: GroupSpec) -> Group:
    """The group that runs `spec`."""
    return BeamGroup(spec) if spec.sampling.beam_width else Group(spec)


def candidates_of(sampled: tuple[SampledToken, ...]) -> Candidates:
    """What a draw of candidates brought."""
    return tuple((each.token_id, each.logprobs.logprob) for each in sampled if each.logprobs is not None)


def _twin(beam: Sequence, pool: BlockPool) -> Sequence:
    """Another beam with the same tokens that holds the same blocks."""
    twin = beam.twin()
    pool.retain(beam.block_table)
    twin.add_blocks(beam.block_table)
    twin.advance(beam.num_computed_tokens)
    return twin
