"""Guides follow their grammar from tokens alone, and get their masks in one call; a lost one is told of."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator

import numpy as np
import pytest

from engine.draws import TokenMask
from engine.guides import MAX_KEPT_GRAMMARS, Guide, Guides
from engine.sequence import Sequence
from models.files.checkpoint import read_checkpoint
from models.grammar import GrammarCompiler
from tandem.errors import InvalidRequest, TandemError
from tandem.types import Constraint, FinishReason, Language, SamplingParams, TokenId

DEMO = read_checkpoint("demo")
(EOS,) = DEMO.eos_token_ids
WAIT_S = 30.0


@pytest.fixture
async def guides() -> AsyncIterator[Guides]:
    guides = Guides(GrammarCompiler.of(DEMO))
    yield guides
    guides.close()


def regex(pattern: str) -> Constraint:
    return Constraint(Language.REGEX, (pattern,))


async def begin(guides: Guides, constraint: Constraint, *outputs: tuple[TokenId, ...]) -> tuple[Guide, ...]:
    """Raises what it fails with, later too."""
    begun: asyncio.Future[tuple[Guide, ...]] = asyncio.get_running_loop().create_future()
    guides.begin(constraint, outputs or ((),), begun.set_result, begun.set_exception)
    return await asyncio.wait_for(begun, WAIT_S)


async def made(guides: Guides, *moved: Guide) -> None:
    done = asyncio.Event()
    guides.follow(moved)
    guides.start(done.set)
    await asyncio.wait_for(done.wait(), WAIT_S)


def allowed(mask: TokenMask | None) -> list[TokenId]:
    assert mask is not None
    return [TokenId(int(bit)) for bit in np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))]


async def test_masks_made_together_are_those_of_whoever_begins_there(guides: Guides) -> None:
    constraint = regex("[a-z]{4}[0-9]+")
    first, *_ = moved = await begin(guides, constraint, *[()] * 12)
    starts = allowed(first.mask)[:12]
    for guide, token_id in zip(moved, starts, strict=True):
        guide.append(token_id)
        assert guide.mask is None

    await made(guides, *moved)

    begun = await begin(guides, constraint, *[(token_id,) for token_id in starts])
    assert [allowed(each.mask) for each in moved] == [allowed(each.mask) for each in begun]


async def test_those_that_have_a_mask_are_left_alone(guides: Guides) -> None:
    moved, still = await begin(guides, regex("a+"), (), ())
    before = still.mask
    moved.append(allowed(moved.mask)[0])

    await made(guides, moved, still)

    assert still.mask is before
    assert EOS in allowed(moved.mask)
    assert EOS not in allowed(before)


async def test_a_fork_stands_at_the_same_place_and_goes_its_own_way(guides: Guides) -> None:
    (guide,) = await begin(guides, regex("ab|cd"))
    twin = guide.fork()
    ids = allowed(twin.mask)
    assert ids == allowed(guide.mask)
    for each, token_id in zip((guide, twin), ids, strict=False):
        each.append(token_id)

    await made(guides, guide, twin)

    assert allowed(guide.mask) != allowed(twin.mask)


async def test_a_grammar_that_ends_leaves_only_the_end(guides: Guides) -> None:
    (guide,) = await begin(guides, regex("a"))
    assert not guide.leaves_only([EOS])
    guide.append(allowed(guide.mask)[0])
    await made(guides, guide)

    assert guide.leaves_only([EOS])


async def test_tokens_that_the_grammar_does_not_allow_cannot_be_resumed(guides: Guides) -> None:
    with pytest.raises(InvalidRequest, match="choices"):
        await begin(guides, regex("a+"), (EOS,))


async def test_a_choice_that_cannot_go_on_is_told_of_and_its_grammar_is_compiled_anew(guides: Guides) -> None:
    constraint = regex("a{1000000}")
    lost: list[TandemError] = []
    begun: asyncio.Future[tuple[Guide, ...]] = asyncio.get_running_loop().create_future()
    guides.begin(constraint, [()], begun.set_result, lost.append)
    (guide,) = await asyncio.wait_for(begun, WAIT_S)
    guide.append(allowed(guide.mask)[0])

    await made(guides, guide)

    assert [error.field for error in lost] == ["sampling.regex"]
    assert guide.mask is None
    await begin(guides, regex("b"))  # behind it in the thread
    assert list(guides._kept) == [regex("b")]


async def test_only_so_many_grammars_are_kept(guides: Guides) -> None:
    for number in range(MAX_KEPT_GRAMMARS + 3):
        await begin(guides, regex(f"a{{{number}}}"))

    assert len(guides._kept) == MAX_KEPT_GRAMMARS


async def test_a_step_waits_for_masks_only_so_long(guides: Guides) -> None:
    (guide,) = await begin(guides, regex("a+"))
    held = threading.Event()
    guides._masking.submit(held.wait, WAIT_S)
    guide.append(allowed(guide.mask)[0])
    done = asyncio.Event()
    guides.follow([guide])
    guides.start(done.set)

    await asyncio.wait_for(guides.settled(), WAIT_S)

    assert guide.mask is None
    held.set()
    await asyncio.wait_for(done.wait(), WAIT_S)
    assert guide.mask is not None


async def test_a_sequence_draws_by_its_mask_and_not_before_it_is_there(guides: Guides) -> None:
    seq = Sequence(0, SamplingParams(max_tokens=9, min_tokens=5, end_token_ids=frozenset({EOS})), (TokenId(5),))
    seq.follow((await begin(guides, regex("a")))[0])
    (draw,) = seq.schedule(1).samples
    assert not seq.runs_ahead
    assert draw.params.min_tokens == 5
    assert draw.mask is not None
    seq.append_token(allowed(draw.mask)[0])
    assert seq.awaits_mask
    assert seq.guide is not None
    await made(guides, seq.guide)

    (draw,) = seq.schedule(1).samples

    assert allowed(draw.mask) == [EOS]
    assert draw.params.min_tokens == 0  # else nothing could be drawn
    assert seq.append_token(EOS) is FinishReason.STOP
    assert not seq.awaits_mask
