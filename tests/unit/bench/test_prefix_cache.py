"""Loads that begin alike, and what is counted of them."""

from __future__ import annotations

import pytest

from bench.peers.streams import OnFirst, Prompt, Stream
from bench.prefix_cache import Measured, bars, run_load
from bench.prefix_loads import LOADS, TASKS, TURNS, LoadShape, talks
from bench.prefix_page import section

SHAPE = LoadShape(requests=12, prompt_tokens=400, output_tokens=8)


class CachingServer:
    """Remembers every prompt and answer, token by token; answers with the prompt's length."""

    def __init__(self) -> None:
        self.known: list[Prompt] = []
        self.prompts: list[Prompt] = []

    async def generate(self, prompt: Prompt, max_tokens: int, on_first: OnFirst | None = None) -> Stream:
        found = max((_common(prompt, each) for each in self.known), default=0)
        answer = (len(prompt),) * max_tokens
        self.prompts.append(prompt)
        self.known.append(prompt + answer)
        return Stream(0.0, ((0.5, 1), (1.0, max_tokens - 1)), answer, cached_tokens=found, transfer_bytes=100)


def _common(one: Prompt, other: Prompt) -> int:
    pairs = zip(one, other, strict=False)
    return next((index for index, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize("reuse", [0.5, 0.9])
async def test_so_much_of_every_prompt_was_computed_before(load: str, reuse: float) -> None:
    server, into = CachingServer(), Measured()

    await run_load(server, talks(load, SHAPE, reuse, 1000, seed=1), SHAPE.output_tokens, 1, into)

    document = into.document()
    assert document["requests"] == SHAPE.requests
    assert document["hit_rate"] == pytest.approx(reuse, abs=0.01)
    assert document["transfer_bytes"] == 100
    assert max(map(len, server.prompts)) == SHAPE.prompt_tokens


def test_loads_differ_in_what_is_shared_by_whom() -> None:
    chats, tasks, system = (talks(load, SHAPE, 0.5, 1000, seed=1) for load in LOADS)

    assert [len(talk.additions) for talk in chats] == [TURNS] * (SHAPE.requests // TURNS)
    assert len({talk.opening for talk in chats}) == len(chats)
    assert len({talk.opening for talk in tasks}) == TASKS
    assert len({talk.opening for talk in system}) == 1


def test_every_round_has_prompts_of_its_own() -> None:
    assert talks("few-shot", SHAPE, 0.5, 1000, seed=1) == talks("few-shot", SHAPE, 0.5, 1000, seed=1)
    assert talks("few-shot", SHAPE, 0.5, 1000, seed=1) != talks("few-shot", SHAPE, 0.5, 1000, seed=2)


def test_turns_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="do not fit into 40 tokens"):
        talks("multi-turn", LoadShape(3, 40, 16), 0.5, 1000, seed=1)


def test_bars_are_met_and_missed_by_the_first_token_and_by_the_peer() -> None:
    def of(first_ms: float, rate: float) -> dict[str, float]:
        names = ("hit_rate", "first_token_p99_ms", "transfer_bytes")
        return {"first_token_p50_ms": first_ms, "tokens_per_s": rate, **dict.fromkeys(names, 0.0)}

    servers = {
        "tandem disaggregated, on": of(20, 90),
        "tandem disaggregated, off": of(100, 50),
        "tandem colocated, on": of(30, 80),
        "tandem colocated, off": of(100, 50),
        "vllm": of(40, 85),
    }
    loads = {"few-shot": {"50%": servers, "90%": servers | {"vllm": of(40, 100)}}}

    found = bars(loads)

    assert [(bar["by_median"], bar["met"]) for bar in found] == [
        (0.2, True),
        (0.3, False),
        (pytest.approx(90 / 85), True),
        (0.9, False),
    ]
    shape = {"prompt_tokens": 400, "output_tokens": 8, "requests": 12}
    settings = {"model": "smoke", "threads": 2, "callers": 2, "rounds": 1, "shape": shape}
    assert "| 90% | vllm | 0% | 40.0 |" in "\n".join(section({**settings, "loads": loads, "bars": found}))
