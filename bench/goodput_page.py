"""The record of `bench.goodput` held against its bars, and in words and tables for the page. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from bench.goodput_search import ATTAINMENT, ITL_FACTOR, TTFT_FACTOR
from bench.pace import LEAST as LEAST_PACE
from bench.peers.bars import Bar, compare
from bench.peers.page import bars_table, interference_section, served_section
from bench.peers.served import AUTO, COLOCATED, TANDEM_SERVERS, VLLM_SERVER
from bench.support.markdown import table

_IMAGES = Path(__file__).parents[1] / "docs" / "images"
VLLM_BAR = 2.0
STATIC_BAR = 1.0
TOGETHER_BAR = 0.95
BURST_BAR = 1.5
TTFT_BAR = 1.0
_MISSING = "–"

Document = Mapping[str, Any]


def image_of(tier: str) -> Path:
    """The plot of a record that was taken with kernels of this tier."""
    return _IMAGES / f"goodput-{tier}.svg"


def bars(results: Document) -> list[Bar]:
    """All of them; one without figures on both sides is not measured."""
    together, burst = results["served"], results["interference"]
    ratio = None if AUTO not in burst else burst[AUTO]["p99_ratio"]
    return [
        *(bar for name, load in results["loads"].items() for bar in _load_bars(name, load["servers"])),
        compare(
            "tokens/s all at once, auto, times colocated",
            TOGETHER_BAR,
            together.get(AUTO, {}).get("tokens_per_s"),
            together.get(COLOCATED, {}).get("tokens_per_s"),
            is_upper=False,
        ),
        Bar("inter-token p99 in the burst, auto, times the quiet p99", BURST_BAR, True, ratio, ratio),
        compare(
            "long prompts' time to first token, auto, times vLLM's",
            TTFT_BAR,
            burst.get(AUTO, {}).get("ttft_ms"),
            burst.get(VLLM_SERVER, {}).get("ttft_ms"),
        ),
    ]


def _load_bars(load: str, servers: Document) -> Iterator[Bar]:
    """Auto against vLLM and against the better of the static forms."""
    auto = _goodput(servers, AUTO)
    passes = VLLM_SERVER not in servers or _goodput(servers, VLLM_SERVER)
    vllms = "vLLM's" if passes else "the lowest rate that vLLM failed; it passed none"
    rivals = {
        f"goodput, {load}, auto, times {vllms}": (VLLM_BAR, [_at_most(servers, VLLM_SERVER)]),
        f"goodput, {load}, auto, times Tandem's better static form": (
            STATIC_BAR,
            [_goodput(servers, name) for name in TANDEM_SERVERS],
        ),
    }
    for name, (limit, theirs) in rivals.items():
        known = [each for each in theirs if each is not None]
        ratio = None if auto is None or len(known) < len(theirs) or not max(known) else auto / max(known)
        yield Bar(name, limit, False, ratio, ratio)


def _goodput(servers: Document, name: str) -> float | None:
    """0 if no rate passed; None if not measured."""
    return None if name not in servers else servers[name]["goodput_per_s"] or 0.0


def _at_most(servers: Document, name: str) -> float | None:
    """Goodput; where no rate passed, the lowest that failed."""
    return _goodput(servers, name) or servers.get(name, {}).get("failed_per_s")


def section(results: Document) -> list[str]:
    """Parts of the page; `results` as `bench.goodput` writes them."""
    settings = results["settings"]
    effort = settings["effort"]
    return [
        f"## Goodput, tier {settings['tier']} (`python -m bench.goodput`)\n",
        f"The highest rate of Poisson arrivals at which at least {ATTAINMENT:.0%} of the requests meet both "
        f"objectives: first token within {TTFT_FACTOR:g} times, and the 95th percentile of a request's own gaps "
        f"between messages within {ITL_FACTOR:g} times the best server's unloaded figures. The {settings['shape']} "
        f"shape, random weights, vLLM in {settings['vllm_dtype']}; {settings['threads']} cores for server and client; "
        "servers take turns, "
        f"{effort['requests']} requests a trial{_for_at_least(effort)}, "
        f"rates in steps of {effort['ratio'] - 1:.0%}. Lengths are log-normal: medians, and limits, in tokens.\n",
        *(f"{name}: `tandem serve {' '.join(options)}`\n" for name, options in settings["servers"].items()),
        *_loads(results),
        *served_section(results),
        *interference_section(results),
        "### The bars of goodput\n",
        bars_table([bar.document() for bar in bars(results)]),
    ]


def _for_at_least(effort: Document) -> str:
    """Nothing before trials were made of stretches."""
    if "least_s" not in effort:
        return ""
    again = ", and as long again where that is close" if effort.get("close") else ""
    turns = f", in {effort['turns']} turns" if "turns" in effort else ""
    return f", and as many again until it lasts {effort['least_s']:g} s{turns}{again}"


def _loads(results: Document) -> list[str]:
    if not results["loads"]:
        return []
    header = (
        *("load", "prompt", "output", "objectives, ms", "server", "unloaded, ms", "goodput, requests/s"),
        *("lowest rate that failed", "missed there: first token, between", "client's share of a core"),
    )
    rows = [
        row
        for name, load in results["loads"].items()
        for row in _load_rows(name, results["settings"]["loads"][name], load)
    ]
    image = f"images/{image_of(results['settings']['tier']).name}"
    return [
        f"![share of requests within both objectives against the rate]({image})\n",
        table(header, rows),
        *_slow_machine(results["loads"].values()),
    ]


def _slow_machine(loads: Iterable[Document]) -> Iterator[str]:
    """Nothing of records before `bench.pace`."""
    trials = [
        (server, trial)
        for load in loads
        for server, each in load["servers"].items()
        for trial in each["trials"]
        if "pace" in trial
    ]
    if trials:
        again = Counter(server for server, trial in trials if trial.get("redone"))
        of_whom = ", ".join(f"{count} of {server}" for server, count in again.items())
        slow = sum(trial["pace"] < LEAST_PACE for _, trial in trials)
        yield (
            f"Of {len(trials)} trials {again.total()} were done again, twice at most{of_whom and f': {of_whom}'}. "
            f"Before or after them the machine was slower than {LEAST_PACE:g} of its median (`bench.pace`). Of those "
            f"that count {slow} were so, too.\n"
        )


def _load_rows(name: str, shape: Document, load: Document) -> Iterator[tuple[str, ...]]:
    objectives = load["objectives"]
    asked = (
        name,
        *(f"{each['median']}, {each['least']}–{each['most']}" for each in (shape["prompt"], shape["output"])),
        f"{objectives['ttft_s'] * 1e3:.0f}, {objectives['itl_s'] * 1e3:.1f}",
    )
    for server, each in load["servers"].items():
        alone = load["unloaded"].get(server)
        lost = [trial for trial in each["trials"] if trial["rate_per_s"] == each["failed_per_s"]]
        yield (
            *asked,
            server,
            _MISSING if alone is None else f"{alone['ttft_ms']:.0f}, {alone['itl_ms']:.1f}",
            f"{each['goodput_per_s']:.2f}" if each["goodput_per_s"] else "none",
            *((f"{lost[0]['rate_per_s']:.2f}", _missed(lost[0])) if lost else (_MISSING, _MISSING)),
            f"{max(trial['client_cpu_share'] for trial in each['trials']):.0%}",
        )


def _missed(trial: Document) -> str:
    return f"{trial['missed_first']}, {trial['missed_between']} of {trial['ended']}"
