"""Renders pages from `bench/results/`: `python -m bench.report`. No figure is typed by hand.

`docs/performance.md` as a whole: one table for each class of machine. In `docs/reliability.md` and `docs/models.md`
what stands between `<!-- figures: NAME -->` and `<!-- end -->`. `docs/images/vllm.svg`: the README's chart against vLLM
on each class of CPU (needs matplotlib). A record that is not there has no rows. `--check` writes nothing; exit code 1
if a page differs.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.claims import as_markdown as claims_table
from bench.host_cost import as_markdown as host_costs
from bench.http_face import as_markdown as http_table
from bench.peers.contenders import LLAMA, OURS, OURS_INT4, OURS_INT8, TRANSFORMERS, VLLM
from bench.peers.servers import AUTO, COLOCATED, DISAGGREGATED, VLLM_SERVER
from bench.soak.calls import NOT_COUNTED, WANTS_ANSWER
from bench.support.machine import RESULTS
from bench.support.markdown import table

DOCS = Path(__file__).parents[1] / "docs"
CHART = DOCS / "images" / "vllm.svg"
CLASSES = {"amx": "CPU with AMX", "avx512_bf16": "CPU with AVX-512 BF16", "avx2": "CPU with AVX2"}
"""Title by tier of the native kernels."""
SHAPES = ("135m", "0.6b", "moe")
SYSTEMS = ("engine", "shm", "tcp", "colocated")
_MISSING = "–"
_PLACE = re.compile(r"(<!-- figures: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
_EXACT = re.compile(r"(\S+) +(\w+) +block +(\d+) chunk +(\d+) +(\d+)/(\d+) prompts equal")
_DYNAMO: Mapping[tuple[str, str], tuple[str, str]] = {
    ("1P1D", "decode-0"): ("600", "never"),
    ("1P1D", "prefill-0"): ("2", "42 s"),
    ("1P1D", "router"): ("136", "17 s"),
}
"""Failed requests and recovery by its tests/fault_tolerance/README.md at commit 01d7aed, of 800 requests."""

Record = dict[str, Any]
Document = Mapping[str, Any]
Row = tuple[str, ...]


def performance(records: Mapping[str, Record]) -> str:
    """The page; `records` by the stem of their file."""
    parts = [
        "# Performance\n",
        "Tandem's speed on each class of machine that was measured, beside its peers on the same cores in the same "
        "run. `python -m bench.report` renders this page from `bench/results/*.json`, which hold every round, the "
        "versions and the machine. [bench/README.md](../bench/README.md) has the commands that take each figure again; "
        "[bench/LOG.md](../bench/LOG.md) has what was tried, kept or not.\n",
        "Medians. Absolute times drift with a machine's neighbours; the last column, against vLLM, is of one run and "
        "holds: more than 1 means that Tandem is faster.\n",
    ]
    for tier, title in CLASSES.items():
        rows = [*_peer_rows(records, tier), *_goodput_rows(records.get(f"goodput-{tier}"))]
        if rows:
            header = ("figure", "Tandem", "vLLM", "llama.cpp", "transformers", "times vLLM")
            taken = [records[stem] for stem in _stems(records, tier)]
            parts += [f"## {title}\n", table(header, rows), *(f"{_taken(each)}\n" for each in taken[:1])]
    gpu, kernels = records.get("gpu"), records.get("kernels-cuda")
    if gpu is not None and kernels is not None:
        parts += [f"## {gpu['results']['gpu']['gpu']}\n", *_gpu(gpu["results"], kernels["results"]), f"{_taken(gpu)}\n"]
    if "gpu-vllm" in records:
        record = records["gpu-vllm"]
        parts += [f"## {record['machine']['gpu']} beside vLLM\n", _gpu_beside_vllm(record), f"{record['method']}\n"]
        parts.append(f"{_taken(record)}\n")
    sections: tuple[tuple[str, str, Callable[[Document], str]], ...] = (
        ("host-cost", "The host's time beside prompts, simulated", host_costs),
        ("transfer", "Hand-offs between two processes", _transfers),
        ("http-face", "HTTP beside gRPC (`python -m bench.http_face`)", lambda found: http_table(found["figures"])),
        ("claims", "Claims (`python -m bench.claims`)", lambda found: claims_table(found["claims"])),
    )
    for stem, title, rendered in sections:
        if stem in records:
            parts += [f"## {title}\n", rendered(records[stem]["results"]), f"{_taken(records[stem])}\n"]
    return "\n".join(parts)


def _stems(records: Mapping[str, Record], tier: str) -> list[str]:
    return [stem for shape in SHAPES if (stem := f"peers-{shape}-{tier}") in records]


def _taken(record: Document) -> str:
    machine = ", ".join(f"{key} {value}" for key, value in record["machine"].items())
    return f"Taken {record['date']} on {machine}."


def _peer_rows(records: Mapping[str, Record], tier: str) -> Iterator[Row]:
    for stem in _stems(records, tier):
        results, shape = records[stem]["results"], stem.split("-")[1]
        for each in results["decode"]:
            yield _row(f"{shape}: decode step {each['workload']}, ms", each["step_ms"], is_rate=False)
        for each in results["prefill"]:
            yield _row(f"{shape}: prompts {each['workload']}, tokens/s", each["tokens_per_s"], is_rate=True)
        for each in results.get("quantized", ())[:1]:
            steps = each["step_ms"]
            for name, theirs in ((OURS_INT8, f"{LLAMA} Q8_0"), (OURS_INT4, f"{LLAMA} Q4_0")):
                found = {OURS: steps[name], LLAMA: steps.get(theirs)} if name in steps else {}
                if found:
                    what = f"{shape}: decode step {each['workload']}, {name.split()[-1]}, ms"
                    yield _row(what, found, is_rate=False)
        yield from _served_rows(results, shape)


def _served_rows(results: Document, shape: str) -> Iterator[Row]:
    served, vllm = results["served"], results["served"].get(VLLM_SERVER, {})
    load = results["settings"]["served"]
    lengths = f"{load['streams']} × ({load['prompt_tokens']} + {load['output_tokens']})"
    for name in (COLOCATED, DISAGGREGATED):
        if name in served:
            deployment = name.split()[-1]
            rates = {OURS: served[name]["tokens_per_s"], VLLM: vllm.get("tokens_per_s")}
            yield _row(f"{shape}: served {lengths}, {deployment}, tokens/s", rates, is_rate=True)
            first = {OURS: served[name]["alone_ttft_ms"], VLLM: vllm.get("alone_ttft_ms")}
            yield _row(f"{shape}: first token alone, {deployment}, ms", first, is_rate=False)
    burst = results["interference"]
    if DISAGGREGATED in burst:
        whose = {DISAGGREGATED: OURS, VLLM_SERVER: VLLM}
        gaps = {whose[name]: {"median": each["burst_ms"]["p99"]} for name, each in burst.items()}
        yield _row(f"{shape}: 99th percentile of gaps beside long prompts, ms", gaps, is_rate=False)


def _row(name: str, figures: Mapping[str, Document | None], *, is_rate: bool) -> Row:
    medians = {who: each["median"] for who, each in figures.items() if each}
    cells = (_number(medians.get(who)) for who in (OURS, VLLM, LLAMA, TRANSFORMERS))
    ours, theirs = medians.get(OURS), medians.get(VLLM)
    ratio = _MISSING if ours is None or theirs is None else f"{ours / theirs if is_rate else theirs / ours:.2f}"
    return (name, *cells, ratio)


def _goodput_rows(record: Record | None) -> Iterator[Row]:
    """Goodput of each form of Tandem; of a server that passed no rate, the lowest that failed, as `< rate`."""
    for load, each in ({} if record is None else record["results"]["loads"]).items():
        servers = each["servers"]
        vllm = servers.get(VLLM_SERVER)
        for name in (AUTO, DISAGGREGATED, COLOCATED):
            if name in servers:
                ours, theirs = servers[name]["goodput_per_s"], None if vllm is None else vllm["goodput_per_s"]
                ratio = f"{ours / theirs:.2f}" if ours and theirs else _MISSING
                if ours and vllm is not None and not theirs and vllm["failed_per_s"]:
                    ratio = f"> {ours / vllm['failed_per_s']:.1f}"
                figures = (_goodput(servers[name]), _MISSING if vllm is None else _goodput(vllm))
                yield (f"goodput, {load}, {name.split()[-1]}, requests/s", *figures, _MISSING, _MISSING, ratio)


def _goodput(server: Document) -> str:
    passed, failed = server["goodput_per_s"], server["failed_per_s"]
    return f"{passed:.2f}" if passed else f"< {failed:.2f}" if failed else _MISSING


def _gpu(results: Document, kernels: Document) -> list[str]:
    rows: list[Row] = []
    for part in results["parts"]:
        found = part["result"]
        if part["name"] == "served" and found:
            for name, server in found["servers"].items():
                load, latency = server["options"], server["latencies_s"]
                lengths = f"{load['concurrency']} × ({load['prompt_tokens']} + {load['output_tokens']})"
                head = f"{found['model']}: served {lengths}, {name}"
                rows.append((f"{head}, tokens/s", _number(server["rates_per_s"]["output_tokens"])))
                for key, what in (("ttft", "first token"), ("itl", "gap")):
                    median, last = (_number(latency[key][which] * 1e3) for which in ("p50", "p99"))
                    rows.append((f"{head}: {what} p50, p99, ms", f"{median}, {last}"))
        if part["name"] == "transfer" and found:
            for each in found["results"]:
                what = f"hand-off, {each['transport']}, blocks of {each['block_bytes'] / 1024:.0f} KiB, GB/s"
                rows.append((what, _number(each["median_gb_per_s"])))
    rows += [(f"idle share of the device, {gap['how']}", f"{gap['idle_share']:.1%}") for gap in kernels["launch_gaps"]]
    return [table(("figure", "Tandem"), rows)]


def _gpu_beside_vllm(record: Document) -> str:
    """Returns a row for each load and figure of a deployment that vLLM has, too."""
    rows = []
    for deployment in ("one worker", "one prefill and one decode worker"):
        for load, ours in record[f"tandem {deployment}"].items():
            theirs, head = record["vllm"][load], f"{load.replace('x', '×')}, {deployment}"
            figures = {OURS: {"median": ours["tok_s"]}, VLLM: {"median": theirs["tok_s"]}}
            rows.append(_row(f"{head}, tokens/s", figures, is_rate=True))
            for key, what in (("ttft", "first token"), ("itl", "gap")):
                for which in ("p50", "p99"):
                    figures = {who: {"median": each[f"{key}_{which}"]} for who, each in ((OURS, ours), (VLLM, theirs))}
                    rows.append(_row(f"{head}: {what} {which}, ms", figures, is_rate=False))
    return table(("figure", "Tandem", "vLLM", "times vLLM"), [(*row[:3], row[-1]) for row in rows])


def _transfers(results: Document) -> str:
    header = ("transport", "block, KiB", "GB/s", "of its ceiling", "one block, ms", "none, ms")
    rows = [
        (
            *(each["transport"], f"{each['block_bytes'] / 1024:.0f}", _number(each["median_gb_per_s"])),
            *(_number(each[name]) for name in ("of_ceiling", "one_block_ms", "empty_ms")),
        )
        for each in results["results"]
    ]
    return table(header, rows)


def _number(value: float | None) -> str:
    """Three digits that count."""
    if value is None:
        return _MISSING
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def put(page: str, records: Mapping[str, Record]) -> str:
    """The page with the figures of these records, which are named as their places; others stay as they are."""

    def place(found: re.Match[str]) -> str:
        name = found[2]
        if name not in records or name not in PLACES:
            return found[0]
        return f"{found[1]}{PLACES[name](records[name]['results'])}\n{_taken(records[name])}\n{found[3]}"

    return _PLACE.sub(place, page)


def faults_section(results: Document) -> str:
    """One row per kill, beside Dynamo's figures."""
    header = (
        *("fleet", "killed", "requests", "failed, in flight", "failed, later", "wrong"),
        *("service back", "recovery", "Dynamo: failed", "recovery"),
    )
    counts = ("requests", "failed_in_flight", "failed_later", "wrong")
    rows = [
        (
            *(each["fleet"], each["killed"], *(str(each[name]) for name in counts)),
            *("never" if each[name] is None else f"{each[name]:.1f} s" for name in ("service_back_s", "recovery_s")),
            *_DYNAMO.get((each["fleet"], each["victim"]), ("", "")),
        )
        for each in results["outcomes"]
    ]
    return table(header, rows)


def soak_section(results: Document) -> str:
    """What was done, what callers met, what was violated."""
    outcomes = sorted({outcome for each in results["calls"].values() for outcome in each}, key=lambda x: (x != "ok", x))
    calls = [(manner, *(str(each.get(name, 0)) for name in outcomes)) for manner, each in results["calls"].items()]
    faults = ", ".join(f"{count} × {what}" for what, count in sorted(results["faults"].items()))
    lost = sum(results["calls"].get(manner, {}).get(each, 0) for manner in WANTS_ANSWER for each in NOT_COUNTED)
    stayed = results["wanted"] - lost
    found = "".join(f", {count} {sort}" for sort, count in results.get("found", {}).items())
    lines = (
        f"Seed {results['seed']}, {len(results['rounds'])} rounds, {results['storm_s'] / 60:.1f} minutes of faults: "
        f"{faults}.\n",
        table(("callers", *outcomes), calls),
        f"Served {results['served']} of {stayed} calls that wanted an answer and had time for it, and whose connection "
        f"stayed ({results['served'] / max(1, stayed):.1%}). Violations: {len(results['violations'])}{found}.\n",
    )
    return "\n".join(lines)


def restarts_section(results: Document) -> str:
    """Returns a row for each half: what all survivors together held more after it than before."""
    header = (
        "transport",
        "killed",
        "times",
        "calls",
        "failed",
        "wrong, left over",
        "survivors: descriptors, threads, MiB",
    )
    rows = []
    for transport, halves in results.items():
        for half in halves:
            failed = ", ".join(f"{count} × {what}" for what, count in half["failed"].items()) or "0"
            violations = "; ".join(half["violations"]) or "nothing"
            counts = (transport, half["victim"], str(half["rounds"]), str(half["calls"]), failed, violations)
            rows.append((*counts, _growth(half["before"], half["after"])))
    return table(header, rows)


def _growth(before: Document, after: Document) -> str:
    grown = {
        what: sum(after[name][what] - before[name][what] for name in before)
        for what in ("descriptors", "threads", "rss_bytes")
    }
    return f"{grown['descriptors']:+d}, {grown['threads']:+d}, {grown['rss_bytes'] / 2**20:+.0f}"


PLACES: Mapping[str, Callable[[Document], str]] = {
    "faults": faults_section,
    "soak": soak_section,
    "restarts": restarts_section,
}


def exact_cells(record: str) -> dict[str, dict[str, set[tuple[int, int]]]]:
    """By label and system: (block size, chunk budget) of each setting in which every prompt was equal."""
    cells: dict[str, dict[str, set[tuple[int, int]]]] = {}
    for label, system, block_size, chunk_tokens, equal, prompts in _EXACT.findall(record):
        if equal == prompts:
            known = cells.setdefault(label, {}).setdefault(system, set())
            known.add((int(block_size), int(chunk_tokens)))
    return cells


def put_exactness(page: str, record: str) -> str:
    """The page with a row for all shapes that were checked alike."""
    shapes: dict[Row, list[str]] = {}
    for label, cells in exact_cells(record).items():
        row = tuple(_settings(cells.get(system, set())) for system in SYSTEMS)
        shapes.setdefault(row, []).append(f"`{label}`")
    rendered = table((*SYSTEMS, "shapes"), [(*row, ", ".join(labels)) for row, labels in shapes.items()])
    return _PLACE.sub(lambda found: f"{found[1]}{rendered}{found[3]}" if found[2] == "exactness" else found[0], page)


def _settings(settings: set[tuple[int, int]]) -> str:
    sizes, chunks = (sorted({each[place] for each in settings}) for place in (0, 1))
    if settings and len(settings) == len(chunks) * len(sizes):
        return f"{', '.join(map(str, sizes))} · {', '.join(map(str, chunks))}"
    return "; ".join(f"{size} · {chunk}" for size, chunk in sorted(settings)) or _MISSING


def draw_chart(records: Mapping[str, Record], path: Path) -> None:
    """Bars, Tandem by vLLM on each class of CPU: decode, prompts, served tokens. Raises OSError."""
    from matplotlib import rcParams
    from matplotlib.figure import Figure

    rcParams["svg.hashsalt"] = "tandem"  # names in the file are then the same each time
    figure = Figure(figsize=(9, 3.2), layout="constrained")
    axis = figure.subplots()
    classes = [(tier, title) for tier, title in CLASSES.items() if f"peers-135m-{tier}" in records]
    for index, (tier, title) in enumerate(classes):
        bars = _chart_ratios(records[f"peers-135m-{tier}"]["results"])
        places = [place + index * 0.8 / len(classes) for place in range(len(bars))]
        axis.bar(places, list(bars.values()), width=0.75 / len(classes), label=title)
        axis.set_xticks([place + 0.3 for place in range(len(bars))], list(bars))
    axis.axhline(1.0, color="grey", linestyle="--")
    axis.set(ylabel="speed, times vLLM's", title="Tandem against vLLM on two CPU cores, 135M Llama, one run each")
    axis.legend()
    figure.savefig(path, metadata={"Date": None})


def _chart_ratios(results: Document) -> dict[str, float]:
    found = {
        f"decode\n{each['workload']}": each["step_ms"][VLLM]["median"] / each["step_ms"][OURS]["median"]
        for each in results["decode"]
        if VLLM in each["step_ms"]
    }
    for each in results["prefill"]:
        rates = each["tokens_per_s"]
        if VLLM in rates:
            found[f"prompts\n{each['workload']}"] = rates[OURS]["median"] / rates[VLLM]["median"]
    served = results["served"]
    if VLLM_SERVER in served:
        ours, theirs = (served[name]["tokens_per_s"]["median"] for name in (COLOCATED, VLLM_SERVER))
        found["served\ntokens/s"] = ours / theirs
    return found


def pages(records: Mapping[str, Record], exactness: str) -> dict[Path, str]:
    """Every page as it should be."""
    reliability, models = DOCS / "reliability.md", DOCS / "models.md"
    return {
        DOCS / "performance.md": performance(records),
        reliability: put(reliability.read_text(), records),
        models: put_exactness(models.read_text(), exactness),
    }


def read_records() -> dict[str, Record]:
    """All results that are there and have a date."""
    found = {path.stem: json.loads(path.read_text()) for path in sorted(RESULTS.glob("*.json"))}
    return {stem: record for stem, record in found.items() if "machine" in record}


def main(arguments: Sequence[str] | None = None) -> int:
    """Writes the pages and the chart, or checks the pages."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 if a page differs")
    args = parser.parse_args(arguments)
    records = read_records()
    wanted = pages(records, (RESULTS / "exactness.txt").read_text())
    if args.check:
        differing = [path.name for path, text in wanted.items() if path.read_text() != text]
        print(*differing, sep="\n")
        return 1 if differing else 0
    for path, text in wanted.items():
        path.write_text(text)
    draw_chart(records, CHART)
    return 0


if __name__ == "__main__":
    sys.exit(main())
