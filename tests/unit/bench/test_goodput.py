import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from bench import pace
from bench.goodput import Comparison, Plan, read_found, read_objectives, read_rates
from bench.goodput_loads import LOADS, Arrival, arrivals
from bench.goodput_page import bars, section
from bench.goodput_search import FAILED, FULL, QUICK, Objectives, Outcome, misses_allowed, num_stretches
from bench.goodput_trial import UNLOADED_LENGTHS_SEED, Trial, Unloaded, measure_unloaded, objectives_of, run_trial
from bench.pace import Pace
from bench.peers.process import PeerError
from bench.peers.served import AUTO, COLOCATED, DISAGGREGATED, VLLM_SERVER, Turn
from bench.peers.streams import OnFirst, Prompt, Stream, StreamClient

OBJECTIVES = Objectives(ttft_s=1.0, itl_s=0.1)


def test_a_trial_at_a_high_rate_has_as_many_requests_as_arrive_in_its_least_time() -> None:
    assert num_stretches(0.3, 40, least_s=60.0) == 1
    assert num_stretches(1.6, 40, least_s=60.0) == 3
    assert num_stretches(1.6, 40, least_s=0.0) == 1


def test_an_outcome_counts_from_the_time_at_which_the_request_was_due() -> None:
    outcome = Outcome.of(10.0, [10.5, 10.6, 10.7, 11.7])
    assert outcome.ttft_s == pytest.approx(0.5)
    assert outcome.itl_s == pytest.approx(0.1 + 0.9 * 0.9)
    assert Outcome.of(0.0, [0.5]) == Outcome(0.5, 0.0)


@pytest.mark.parametrize(
    ("outcome", "misses"),
    [
        (Outcome(1.0, 0.1), (False, False)),
        (Outcome(1.01, 0.1), (True, False)),
        (Outcome(1.0, 0.11), (False, True)),
        (FAILED, (True, True)),
    ],
)
def test_a_request_attains_if_it_meets_both_objectives(outcome: Outcome, misses: tuple[bool, bool]) -> None:
    assert (outcome.misses_first(OBJECTIVES), outcome.misses_between(OBJECTIVES)) == misses
    assert outcome.attains(OBJECTIVES) is not any(misses)


def test_a_tenth_of_the_requests_may_miss() -> None:
    assert [misses_allowed(count) for count in (1, 9, 10, 19, 20, 80)] == [0, 0, 1, 1, 2, 8]
    good, late = Outcome(0.5, 0.05), Outcome(2.0, 0.05)
    assert trial_of([good] * 9 + [late]).passed
    assert not trial_of([good] * 8 + [late, FAILED]).passed
    assert not trial_of([good] * 8, requests=10).passed


def trial_of(outcomes: list[Outcome], requests: int | None = None) -> Trial:
    return Trial(1.0, requests or len(outcomes), OBJECTIVES, tuple(outcomes), client_cpu_share=0.01, seconds=1.0)


def test_a_trial_says_what_was_missed() -> None:
    document = trial_of([Outcome(0.5, 0.05), Outcome(2.0, 0.05), Outcome(2.0, 0.2), FAILED]).document()
    assert (document["attainment"], document["passed"]) == (0.25, False)
    assert (document["missed_first"], document["missed_between"], document["failed"]) == (3, 2, 1)
    assert document["ttft_ms"]["p50"] == pytest.approx(2000)


@pytest.mark.parametrize(("misses", "close"), [(2, False), (3, True), (4, True), (5, True), (6, False)])
def test_a_trial_won_or_lost_by_one_request_of_forty_is_close(misses: int, close: bool) -> None:
    trial = trial_of([Outcome(0.5, 0.05)] * (40 - misses) + [Outcome(2.0, 0.05)] * misses)
    assert trial.is_close(0.035) is close


def test_two_trials_as_one_pass_by_all_of_their_requests() -> None:
    good, lost = trial_of([Outcome(0.5, 0.05)] * 40), trial_of([Outcome(0.5, 0.05)] * 35 + [FAILED] * 5)
    assert not lost.passed
    assert lost.and_then(good).passed
    assert lost.and_then(good).requests == len(lost.and_then(good).outcomes) == 80


def test_objectives_are_multiples_of_the_best_servers_medians() -> None:
    quick, smooth = Unloaded([0.1, 0.2, 9.0], [0.05] * 3), Unloaded([0.3], [0.01])
    found = objectives_of([quick, smooth])
    assert (found.ttft_s, found.itl_s) == pytest.approx((1.6, 0.03))


def test_an_earlier_run_gives_objectives_and_where_searches_begin(tmp_path: Path) -> None:
    servers = {
        AUTO: {"goodput_per_s": 1.2, "failed_per_s": 1.4},
        VLLM_SERVER: {"goodput_per_s": None, "failed_per_s": 0.2},
    }
    load = {"objectives": {"ttft_s": 1.0, "itl_s": 0.1}, "servers": servers}
    earlier = tmp_path / "record.json"
    earlier.write_text(json.dumps({"results": {"loads": {"mixed": load}}}))

    assert read_objectives(earlier) == {"mixed": OBJECTIVES}
    assert read_rates(earlier) == {"mixed": {AUTO: 1.2, VLLM_SERVER: 0.2}}


def test_a_run_goes_on_after_the_loads_of_an_earlier_one_that_had_the_same_plan(tmp_path: Path) -> None:
    plan = Plan("smoke", (0,), {AUTO: ("--workers", "2")}, None, ("mixed",), QUICK, {}, first_per_s=1.0)
    kept = tmp_path / "kept.json"
    kept.write_text(json.dumps({"settings": plan.settings(), "loads": {"mixed": {"servers": {}}}}))
    assert read_found(kept, replace(plan, effort=FULL)) == {"mixed": {"servers": {}}}
    assert read_found(None, plan) == {}
    with pytest.raises(SystemExit, match="arrivals_seed"):
        read_found(kept, replace(plan, arrivals_seed=2))


class FakeServer:
    """Answers at once, as if the first token had taken `ttft_s`; keeps what it was asked."""

    def __init__(self, ttft_s: float, fails: int = 0) -> None:
        self.prompts: list[Prompt] = []
        self._ttft_s = ttft_s
        self._fails = fails

    async def generate(self, prompt: Prompt, max_tokens: int, on_first: OnFirst | None = None) -> Stream:
        sent_s = time.perf_counter()
        self.prompts.append(prompt)
        if len(self.prompts) <= self._fails:
            raise PeerError("refused")
        return Stream(sent_s, tuple((sent_s + self._ttft_s + 0.01 * index, 1) for index in range(max_tokens)))


REQUESTS = tuple(Arrival(0.0, prompt_tokens, 5) for prompt_tokens in range(1, 11))
GENEROUS = Objectives(ttft_s=1e6, itl_s=1e6)


async def test_a_trial_sends_every_request_with_prompts_that_no_other_trial_has() -> None:
    server = FakeServer(ttft_s=0.2)
    for seed in (1, 2):
        trial = await run_trial(server, REQUESTS, 1.0, GENEROUS, 1000, seed)
        assert trial.passed
        assert len(trial.outcomes) == 10
    assert sorted(map(len, server.prompts)) == sorted([*range(1, 11), *range(1, 11)])
    assert len(set(server.prompts)) == 20


async def test_a_lost_trial_is_left_early_and_does_not_pass() -> None:
    later = (*REQUESTS[:3], Arrival(3600.0, 8, 5))
    trial = await run_trial(FakeServer(ttft_s=9.0), later, 1.0, OBJECTIVES, 1000, 1, misses_allowed=0)
    assert (len(trial.outcomes), trial.passed) == (3, False)


async def test_a_failed_request_misses_and_a_server_that_only_fails_is_an_error() -> None:
    trial = await run_trial(FakeServer(0.2, fails=2), REQUESTS, 1.0, GENEROUS, 1000, 1)
    assert (trial.document()["failed"], trial.passed) == (2, False)
    with pytest.raises(PeerError, match="refused"):
        await run_trial(FakeServer(0.2, fails=10), REQUESTS, 1.0, GENEROUS, 1000, 1)


async def test_a_trial_that_is_cancelled_leaves_no_task() -> None:
    trial = asyncio.create_task(run_trial(FakeServer(0.2), (Arrival(3600.0, 8, 5),), 1.0, OBJECTIVES, 1000, 1))
    await asyncio.sleep(0)
    trial.cancel()
    with pytest.raises(asyncio.CancelledError):
        await trial
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_unloaded_requests_are_the_loads_own_and_as_long_for_every_server() -> None:
    server, into = FakeServer(ttft_s=0.2), Unloaded()
    await measure_unloaded(server, LOADS["mixed"], 4, 1000, 7, into)
    assert [len(each) for each in server.prompts] == [
        each.prompt_tokens for each in arrivals(LOADS["mixed"], 1.0, 4, UNLOADED_LENGTHS_SEED)
    ]
    gaps = dict.fromkeys(("itl_ms", "gap_ms"), pytest.approx(10))
    assert into.document() == {"ttft_ms": pytest.approx(200), **gaps, "pace": 1.0}


def test_the_pace_is_that_of_the_median_look() -> None:
    taken_s = iter([0.2, 0.1, 0.2, 0.4])
    machine = Pace(lambda: next(taken_s))
    assert [machine.look() for _ in range(4)] == pytest.approx([1.0, 1.5, 1.0, 0.5])


async def test_looks_at_a_machine_that_is_waited_for_do_not_make_slow_the_usual(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pace, "APART_S", 0.0)
    taken_s = iter([0.1, 0.1, 0.2, 0.2, 0.2, 0.1, 0.2])
    machine = Pace(lambda: next(taken_s))
    assert [machine.look(), machine.look(), await machine.wait(), machine.look()] == pytest.approx([1.0, 1.0, 1.0, 0.5])


async def test_the_machine_is_looked_at_between_turns() -> None:
    has_turn, seen = False, []

    @contextlib.asynccontextmanager
    async def turn() -> AsyncIterator[None]:
        nonlocal has_turn
        has_turn = True
        yield
        has_turn = False

    async def measure() -> str:
        return "found"

    def probe_s() -> float:
        seen.append(has_turn)
        return 1.0

    assert await Pace(probe_s).hold(turn, measure) == ("found", 1.0, 0)
    assert seen == [False, False]


ONE_TRIAL = replace(QUICK, requests=4, least_s=0.0, trials=1, longest_s=1e-3)


class Paces(Pace):
    """Those that it is given."""

    def __init__(self, looks: Iterator[float]) -> None:
        super().__init__(lambda: 1.0)
        self._looks = looks

    def look(self) -> float:
        self._taken_s.append(1.0)
        return next(self._looks)


def turn_of(server: StreamClient) -> Turn:
    """Of a server that is alone."""

    @contextlib.asynccontextmanager
    async def turn() -> AsyncIterator[StreamClient]:
        yield server

    return turn


@pytest.mark.parametrize(
    ("paces", "tried", "counted"),
    [
        ([1.0, 1.0], 1, (1.0, 0)),
        ([0.5, 0.6, 1.0, 1.0], 1, (1.0, 0)),  # waits
        ([1.0, 0.5, 0.6, 1.0, 1.0], 2, (1.0, 1)),
        ([1.0, 0.6, 1.0, 0.5, 1.0, 0.4], 3, (0.4, 2)),
        ([*[0.5] * 12, 1.0] * 3, 3, (0.5, 2)),  # a machine that stays slow
    ],
)
async def test_a_trial_on_a_machine_that_is_slow_is_done_again(
    monkeypatch: pytest.MonkeyPatch, paces: list[float], tried: int, counted: tuple[float, int]
) -> None:
    monkeypatch.setattr(pace, "APART_S", 0.0)
    server, looks = FakeServer(ttft_s=0.2), iter(paces)
    plan = Plan("smoke", (0,), {}, None, ("mixed",), ONE_TRIAL, {"mixed": GENEROUS}, first_per_s=1e6)
    results = await Comparison(plan, {AUTO: turn_of(server)}, lambda _: None, Paces(looks)).run()
    [trial] = results["loads"]["mixed"]["servers"][AUTO]["trials"]
    assert (trial["pace"], trial["redone"]) == counted
    assert len({prompt for prompt in server.prompts if prompt != (5, 6, 7, 8)}) == 4 * tried
    again = f"1 were done again, twice at most: 1 of {AUTO}" if counted[1] else "0 were done again"
    assert f"Of 1 trials {again}" in "\n".join(section(results))
    assert next(looks, None) is None


class Asked(FakeServer):
    """Keeps in common with others who was asked what belongs to a trial."""

    def __init__(self, name: str, asked: list[str], ttft_s: float) -> None:
        super().__init__(ttft_s)
        self._name, self._asked = name, asked

    async def generate(self, prompt: Prompt, max_tokens: int, on_first: OnFirst | None = None) -> Stream:
        if prompt != (5, 6, 7, 8):
            self._asked.append(self._name)
        return await super().generate(prompt, max_tokens, on_first)


IN_TURNS = replace(QUICK, requests=10, least_s=2e-5, turns=2, close=0.05, trials=1, longest_s=1e-3)
"""At a million requests per second two stretches, in two turns."""


async def asked_of_two(ttft_s: float, objectives: Objectives) -> tuple[list[str], list[int]]:
    """Who was asked, as often as the other one was not between; and the requests of each one's trial."""
    asked: list[str] = []
    turns = {name: turn_of(Asked(name, asked, each)) for name, each in (("one", 0.2), ("other", ttft_s))}
    plan = Plan("smoke", (0,), {}, None, ("mixed",), IN_TURNS, {"mixed": objectives}, first_per_s=1e6)
    results = await Comparison(plan, turns, lambda _: None, Pace(lambda: 1.0)).run()
    trials = [each["trials"][0]["requests"] for each in results["loads"]["mixed"]["servers"].values()]
    return [name for name, _ in groupby(asked)], trials


async def test_servers_have_the_parts_of_their_trials_in_turns() -> None:
    assert await asked_of_two(0.3, GENEROUS) == (["one", "other", "one", "other"], [20, 20])


async def test_a_trial_that_is_lost_has_no_more_turns() -> None:
    assert await asked_of_two(9.0, Objectives(ttft_s=1.0, itl_s=1e6)) == (["one", "other", "one"], [20, 10])


async def test_requests_one_at_a_time_are_measured_again_on_a_machine_that_was_slow(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pace, "APART_S", 0.0)
    server = FakeServer(ttft_s=0.2)
    plan = Plan("smoke", (0,), {}, None, ("mixed",), replace(ONE_TRIAL, unloaded=2), {}, first_per_s=1e6)
    looks = iter([0.5, 1.0, 0.6, 1.0, 1.0, 1.0, 1.0])
    results = await Comparison(plan, {AUTO: turn_of(server)}, lambda _: None, Paces(looks)).run()
    assert len({prompt for prompt in server.prompts if prompt != (5, 6, 7, 8)}) == 2 + 2 + 4
    assert results["loads"]["mixed"]["unloaded"][AUTO]["pace"] == 1.0
    assert next(looks, None) is None


def record(goodput: dict[str, float | None]) -> dict[str, Any]:
    document = trial_of([Outcome(0.5, 0.05)] * 8 + [Outcome(2.0, 0.2)] * 2).document()
    servers = {
        name: {"goodput_per_s": each, "failed_per_s": 1.0, "trials": [document]} for name, each in goodput.items()
    }
    shape = {"median": 300, "least": 16, "most": 2048}
    return {
        "settings": {
            "shape": "135m",
            "tier": "avx2",
            "vllm_dtype": "float32",
            "threads": 2,
            "servers": {AUTO: ["--workers", "2"]},
            "effort": {"requests": 10, "ratio": 1.1},
            "loads": {"mixed": {"prompt": shape, "output": shape}},
            "served": {},
            "burst": {},
        },
        "loads": {"mixed": {"objectives": {"ttft_s": 1.6, "itl_s": 0.04}, "unloaded": {}, "servers": servers}},
        "served": {},
        "interference": {},
    }


def test_bars_compare_auto_with_vllm_and_with_the_better_static_form() -> None:
    found = bars(record({VLLM_SERVER: 0.5, COLOCATED: 1.0, DISAGGREGATED: 1.25, AUTO: 1.5}))
    assert [(bar.by_median, bar.met) for bar in found[:2]] == [(3.0, True), (pytest.approx(1.2), True)]
    assert [bar.met for bar in found[2:]] == [None, None, None]


def test_a_peer_that_passes_nowhere_counts_with_the_lowest_rate_that_it_failed() -> None:
    found = bars(record({VLLM_SERVER: None, COLOCATED: 1.0, DISAGGREGATED: 1.25, AUTO: 1.5}))
    assert found[0].by_median == 1.5
    assert found[0].name == "goodput, mixed, auto, times the lowest rate that vLLM failed; it passed none"
    assert bars(record({AUTO: 1.5}))[0].met is None


def test_the_page_shows_goodput_and_what_was_missed_beyond_it() -> None:
    results = record({COLOCATED: 1.0, AUTO: None})
    text = "\n".join(section({**results, "bars": [bar.document() for bar in bars(results)]}))
    assert f"| {COLOCATED} | – | 1.00 | 1.00 | 2, 2 of 10 | 1% |" in text
    assert f"| {AUTO} | – | none |" in text
    assert "goodput, mixed, auto, times vLLM's | ≥ 2 | – | – | not measured |" in text
