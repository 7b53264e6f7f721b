"""Choices that follow a grammar draw the same tokens alone, together, resumed and preempted, and only valid ones."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench.support.tiny_models import VOCAB_SIZE
from engine.guides import Guides
from models.grammar import GrammarCompiler
from tandem.errors import InvalidRequest, UnsupportedOption
from tandem.types import ChoiceSpec, Constraint, GroupSpec, Language, TokenId, WaitReason

EOS = TokenId(256)
"""Of the byte tokenizer; the model has more tokens than that."""
PATTERN = "([a-f]{2,6}[0-9])+;|é{3}"
MAX_TOKENS = 24

MakeSpec = Callable[..., GroupSpec]


@pytest.fixture
def guides(byte_checkpoint: Path) -> Iterator[Guides]:
    guides = Guides(GrammarCompiler(byte_checkpoint, VOCAB_SIZE, [EOS]))
    yield guides
    guides.close()


def bound(spec: GroupSpec, pattern: str = PATTERN, **sampling: Any) -> GroupSpec:
    constraint = Constraint(Language.REGEX, (pattern,))
    ends = frozenset({EOS})
    return replace(spec, sampling=replace(spec.sampling, constraint=constraint, end_token_ids=ends, **sampling))


def check(tokens: list[TokenId], max_tokens: int = MAX_TOKENS) -> None:
    """Whole texts match; one that max_tokens cut would go on to match."""
    if tokens[-1] == EOS:
        assert re.fullmatch(PATTERN, bytes(tokens[:-1]).decode())
    else:
        assert len(tokens) == max_tokens
        assert re.match("[a-f0-9é]+", bytes(tokens).decode(errors="ignore"))


@pytest.mark.parametrize("overlap_steps", [True, False])
async def test_choices_are_valid_and_equal_to_single_requests(
    open_bench: Any, make_spec: MakeSpec, guides: Guides, overlap_steps: bool
) -> None:
    spec = bound(make_spec(20, MAX_TOKENS, n=12, temperature=1.0, seed=7))
    singles = [replace(spec, sampling=spec.sampling.of_choice(i), choices=(ChoiceSpec(0),)) for i in range(12)]
    free = make_spec(33, MAX_TOKENS, temperature=1.0)
    async with open_bench(num_blocks=256, max_seqs=48, overlap_steps=overlap_steps, guides=guides) as bench:
        ((alone,),) = await bench.complete([free])
        together, *others = await bench.complete([spec, free, *singles])

    assert others == [[alone], *([tokens] for tokens in together)]
    assert sum(tokens[-1] == EOS for tokens in together) > 2
    for tokens in together:
        check(tokens)


async def test_resumed_choices_go_on_from_their_tokens(open_bench: Any, make_spec: MakeSpec, guides: Guides) -> None:
    spec = bound(make_spec(20, MAX_TOKENS, n=3, temperature=1.0, seed=7))
    async with open_bench(guides=guides) as bench:
        (whole,) = await bench.complete([spec])
        cuts = [min(number, len(tokens) - 1) for number, tokens in enumerate(whole)]  # 0 = one that has not begun
        choices = tuple(ChoiceSpec(i, tuple(whole[i][:cut])) for i, cut in enumerate(cuts))
        handle = bench.reserve(replace(spec, choices=choices), first_offsets=cuts)
        await bench.finish([handle])

        assert bench.router.completions(handle) == [tokens[cut:] for tokens, cut in zip(whole, cuts, strict=True)]


async def test_preempted_choices_draw_what_they_would_have_drawn(
    open_bench: Any, make_spec: MakeSpec, guides: Guides
) -> None:
    specs = [bound(make_spec(length, 60, n=2, temperature=1.0), "[a-f]{50}") for length in (30, 31, 32, 33)]
    async with open_bench(4, 512, guides=guides) as bench:
        expected = await bench.complete(specs)
    async with open_bench(4, 64, guides=guides) as bench:
        assert await bench.complete(specs) == expected
        assert bench.worker.load().preemptions > 0


async def test_a_grammar_that_is_done_ends_the_choice_whatever_min_tokens_says(
    open_bench: Any, make_spec: MakeSpec, guides: Guides
) -> None:
    done = bound(make_spec(9, MAX_TOKENS, temperature=1.0), "ab?", min_tokens=9)
    longer = bound(make_spec(9, MAX_TOKENS, temperature=1.0), "a*", min_tokens=9)
    async with open_bench(guides=guides) as bench:
        ((short,),), ((long,),) = [await bench.complete([spec]) for spec in (done, longer)]

    assert bytes(short[:-1]) == b"ab"  # the end would have been allowed before, but for min_tokens
    assert short[-1] == EOS
    assert set(long[:9]) == {TokenId(ord("a"))}


@pytest.mark.parametrize("pattern", ["(a", "[^\\x00-\\x{10FFFF}]"])
async def test_what_cannot_be_compiled_fails_its_request_alone(
    open_bench: Any, make_spec: MakeSpec, guides: Guides, pattern: str
) -> None:
    async with open_bench(guides=guides) as bench:
        handle = bench.reserve(bound(make_spec(9, MAX_TOKENS), pattern))
        await bench.router.until(lambda: bench.router.errors)
        error = bench.router.errors.pop(handle)
        ((tokens,),) = await bench.complete([bound(make_spec(9, MAX_TOKENS))])

    assert isinstance(error, InvalidRequest)
    assert error.field == "sampling.regex"
    check(tokens)


async def test_what_becomes_too_complex_fails_its_request_alone(
    open_bench: Any, make_spec: MakeSpec, guides: Guides
) -> None:
    async with open_bench(guides=guides) as bench:
        handle = bench.reserve(bound(make_spec(9, 200), "a{1000000}"))
        other = bench.reserve(bound(make_spec(8, MAX_TOKENS)))
        await bench.router.until(lambda: bench.router.errors and other in bench.router.ended)
        error = bench.router.errors.pop(handle)

    assert isinstance(error, InvalidRequest)
    assert error.field == "sampling.regex"


async def test_a_released_request_leaves_nothing_behind_while_its_grammar_is_compiled(
    open_bench: Any, make_spec: MakeSpec, guides: Guides
) -> None:
    async with open_bench(guides=guides) as bench:
        handle = bench.reserve(bound(make_spec(9, MAX_TOKENS)))
        assert [reason for _, reason in bench.worker.waits()] == [WaitReason.ROOM]
        bench.worker.release(bench.router, handle)
        await bench.complete([bound(make_spec(9, MAX_TOKENS))])

        assert bench.router.completions(handle) == []


async def test_a_worker_without_a_tokenizer_takes_no_constraint(open_bench: Any, make_spec: MakeSpec) -> None:
    async with open_bench() as bench:
        handle = bench.reserve(bound(make_spec(9, MAX_TOKENS)))

        assert isinstance(bench.router.errors.pop(handle), UnsupportedOption)
