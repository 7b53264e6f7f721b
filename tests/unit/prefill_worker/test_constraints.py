"""A prompt whose tokens follow a grammar waits outside the line until that is compiled, and draws by its mask."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from engine.guides import Guide, Lost
from tandem.errors import InvalidRequest
from tandem.types import Constraint, GroupSpec, Language, TokenId

CONSTRAINT = Constraint(Language.REGEX, ("a",))
MASK = np.array([7], dtype=np.uint32)


class HeldGuides:
    """Compiles nothing before the test says so."""

    def __init__(self) -> None:
        self.outputs: Sequence[tuple[TokenId, ...]] = ()

    def begin(
        self,
        constraint: Constraint,
        outputs: Sequence[tuple[TokenId, ...]],
        ready: Callable[[tuple[Guide, ...]], None],
        failed: Lost,
    ) -> None:
        assert constraint is CONSTRAINT
        matcher: Any = None
        self.outputs, self.failed = outputs, failed
        self.ready = lambda: ready(tuple(Guide(constraint, matcher, MASK, failed) for _ in outputs))

    def start(self, on_made: Callable[[], None]) -> None:
        """Nobody needs a second mask here."""

    async def settled(self) -> None:
        """At once."""


@pytest.fixture
def guides() -> HeldGuides:
    return HeldGuides()


@pytest.fixture
async def guided(make_bench: Any, guides: HeldGuides) -> Any:
    return make_bench(guides=guides)


def bound(spec: GroupSpec) -> GroupSpec:
    return replace(spec, sampling=replace(spec.sampling, constraint=CONSTRAINT))


async def test_first_tokens_are_drawn_by_the_mask(guided: Any, guides: HeldGuides, make_spec: Any) -> None:
    handle = guided.prefill(1, bound(make_spec(10, num_output_tokens=(0, 0))))
    other = guided.prefill(2, make_spec(4))
    await guided.router.until(lambda: other in guided.router.handoffs)
    assert handle not in guided.router.first_tokens
    assert guides.outputs == [(), ()]

    guides.ready()

    await guided.router.until(lambda: handle in guided.router.handoffs)
    drawn = [sample for batch in guided.engine.batches for seq in batch for sample in seq.samples]
    assert [sample.mask is MASK for sample in drawn] == [False, True, True]
    await guided.settles()


async def test_a_request_that_was_released_meanwhile_does_not_come_back(
    guided: Any, guides: HeldGuides, make_spec: Any
) -> None:
    handle = guided.prefill(1, bound(make_spec(10)))
    guided.worker.release(guided.router, handle)

    guides.ready()
    guides.failed(InvalidRequest("sampling.regex", "too complex"))

    await guided.settles()
    assert not guided.engine.batches


async def test_a_grammar_that_cannot_be_compiled_fails_its_request(
    guided: Any, guides: HeldGuides, make_spec: Any
) -> None:
    handle = guided.prefill(1, bound(make_spec(10)))
    error = InvalidRequest("sampling.regex", "too complex")

    guides.failed(error)
    guides.failed(error)  # each choice may say so

    await guided.settles()
    assert guided.router.errors[handle] is error
