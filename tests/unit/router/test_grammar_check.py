"""A constraint is judged in a process that may be ended: what is made to last, or to break it, harms nobody."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import resource
from collections.abc import AsyncIterator

import pytest

from models.files.checkpoint import resolve_model
from router.grammar_check import GrammarCheck
from tandem.errors import InvalidRequest
from tandem.types import Constraint, Language

GOOD = Constraint(Language.REGEX, ("a+",))


@pytest.fixture
async def check() -> AsyncIterator[GrammarCheck]:
    check = GrammarCheck(resolve_model("demo"))
    yield check
    check.close()


def schema(value: object) -> Constraint:
    return Constraint(Language.JSON_SCHEMA, (json.dumps(value),))


async def test_what_can_be_compiled_passes_and_is_remembered(check: GrammarCheck) -> None:
    await check.check(GOOD)
    process = check._process
    assert process is not None
    process.kill()
    process.wait()

    await check.check(GOOD)

    assert check._process is process  # which could not have answered


async def test_what_cannot_is_refused_each_time_with_the_reason(check: GrammarCheck) -> None:
    for _ in range(2):
        with pytest.raises(InvalidRequest, match="error: unclosed group") as refused:
            await check.check(Constraint(Language.REGEX, ("(a",)))
        assert refused.value.field == "sampling.regex"


async def test_a_process_that_has_died_is_replaced(check: GrammarCheck) -> None:
    await check.check(GOOD)
    assert check._process is not None
    check._process.kill()
    check._process.wait()

    await check.check(Constraint(Language.REGEX, ("b+",)))


async def test_a_router_with_many_connections_can_ask(check: GrammarCheck) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (2048, hard))
    try:
        with contextlib.ExitStack() as connections:
            for _ in range(1024):
                connections.callback(os.close, os.open(os.devnull, os.O_RDONLY))
            await check.check(GOOD)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


LONG = Constraint(
    Language.GRAMMAR, ("\n".join(f"T{i}: T{i + 1} T{i + 1}" for i in range(2000)) + '\nT2000: "a"\nstart: T0',)
)
"""Of many terminals, each twice the next one: its compile would not end."""
_CHAIN = {f"d{i}": {"properties": {"a": {"$ref": f"#/$defs/d{i + 1}"}}} for i in range(1000)}
DEEP = schema({"$defs": {**_CHAIN, "d1000": {"type": "string"}}, "$ref": "#/$defs/d0"})
"""References that take more than the stack."""


@pytest.mark.parametrize("given", [LONG, DEEP], ids=["long", "deep"])
async def test_what_takes_too_much_is_refused_while_the_loop_goes_on(check: GrammarCheck, given: Constraint) -> None:
    checking = asyncio.create_task(check.check(given))
    turns = 0
    while not checking.done():
        await asyncio.sleep(0)
        turns += 1

    assert turns > 10
    with pytest.raises(InvalidRequest, match="too much time or memory") as refused:
        await checking
    assert refused.value.field == f"sampling.{given.language}"
    await check.check(GOOD)


async def test_the_process_ends_with_its_input(check: GrammarCheck) -> None:
    await check.check(GOOD)
    assert check._process is not None
    assert check._process.stdin is not None
    check._process.stdin.close()

    assert await asyncio.to_thread(check._process.wait, 10) == os.EX_OK
