"""The page's section of what `make gpu` showed. Pure."""

from __future__ import annotations

from typing import Any

from bench.support.markdown import table

TITLE = "## On a GPU (`make gpu`)\n"
ABSENT = [
    TITLE,
    "Not measured: no GPU. One command takes all of it on a machine that has one, in less than ten minutes.\n",
]

_LATENCIES = {"ttft": "first token", "itl": "between tokens"}


def section(results: dict[str, Any]) -> list[str]:
    """Parts and how they ended, then the figures of those that gave some."""
    gpu = ", ".join(f"{name} {value}" for name, value in results["gpu"].items())
    lines = [
        TITLE,
        f"GPUs: {results['num_gpus']}. The first: {gpu}.\n",
        table(
            ("part", "ended", "s", "said"),
            [_ended(each) for each in results["parts"]],
        ),
        table(
            ("transport", "works", "why"),
            [(each["name"], "yes" if each["usable"] else "no", each["reason"]) for each in results["transports"]],
        ),
    ]
    transfers = _results(results, "transfer")
    if transfers:
        lines.append(_transfer(transfers))
    lines += map(_served, _results(results, "served"))
    return lines


def _ended(part: dict[str, Any]) -> tuple[str, ...]:
    how = "well" if part["succeeded"] else "**not well**"
    return f"`{part['command']}`", how, f"{part['seconds']:.0f}", part["last_words"].replace("|", "\\|")


def _results(results: dict[str, Any], name: str) -> list[dict[str, Any]]:
    """Figures of the parts of this name that gave some."""
    return [each["result"] for each in results["parts"] if each["name"] == name and each["result"] is not None]


def _transfer(transfers: list[dict[str, Any]]) -> str:
    rows = [
        (
            *(each["transport"], f"{each['block_bytes'] / 1024:.0f}", f"{each['median_gb_per_s']:.2f}"),
            "–" if each["of_ceiling"] is None else f"{each['of_ceiling']:.2f}",
        )
        for result in transfers
        for each in result["results"]
    ]
    return table(("from GPU to GPU", "block, KiB", "median, GB/s", "of its ceiling"), rows)


def _served(result: dict[str, Any]) -> str:
    """All servers on one model."""
    options = next(iter(result["servers"].values()))["options"]
    shape = f"{options['concurrency']} callers, {options['prompt_tokens']} + {options['output_tokens']} tokens"
    rows = [
        (name, f"{server['rates_per_s']['output_tokens']:.0f}", *_latencies(server["latencies_s"]))
        for name, server in result["servers"].items()
    ]
    heads = [f"{name}, ms: mean, p50, p99" for name in _LATENCIES.values()]
    return table((f"served, {result['model']} shape, {shape}", "output tokens/s", *heads), rows)


def _latencies(found: dict[str, dict[str, float]]) -> list[str]:
    return [
        ", ".join(f"{found[name][which] * 1e3:.1f}" for which in ("mean", "p50", "p99")) if found[name] else "–"
        for name in _LATENCIES
    ]
