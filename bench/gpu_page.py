"""The page's section of what `make gpu` showed. Pure."""

from __future__ import annotations

from typing import Any

from bench.markdown import table

TITLE = "## On a GPU (`make gpu`)\n"
ABSENT = [
    TITLE,
    "Not measured: no GPU. One command takes all of it on a machine that has one, in less than ten minutes.\n",
]


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
    options, rates = result["options"], result["rates_per_s"]
    shape = f"{options['concurrency']} callers, {options['prompt_tokens']} + {options['output_tokens']} tokens"
    rows = [
        (f"{name}, ms", *(f"{found[which] * 1e3:.1f}" for which in ("mean", "p50", "p99")))
        for name, found in result["latencies_s"].items()
        if found is not None
    ]
    rows.append(("output tokens per s", f"{rates['output_tokens']:.0f}", "", ""))
    return table((f"served, demo model, {shape}", "mean", "p50", "p99"), rows)
