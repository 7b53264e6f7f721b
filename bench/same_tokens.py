"""Whether a change of the code changed any answer: `python -m bench.same_tokens --record FILE`, then `--compare FILE`.

Random requests over every sampling parameter (`bench.support.random_requests`) go to `tandem serve` on the demo
model, many at a time: one half to a cluster that hands KV over through shared memory, the other half
through TCP. A part of both goes once more to one worker that computes prompts itself, in a pool so small
that sequences are preempted, and another part to two elastic workers: tokens must be those of the other clusters.

`--compare` sends the same requests to this checkout and exits with 1 if anything differs but
log-probabilities by less than `LOGPROB_TOLERANCE`; it names every request that differs.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.support.cluster import serve
from bench.support.machine import describe_machine, today
from bench.support.random_requests import MAX_PRIORITY, RandomRequest, digest, make_requests
from tandem.client import AsyncClient, Choice, GenerationUpdate
from tandem.errors import TandemError
from tandem.types import TokenLogprobs

MODEL = "demo"
SEED = 8
NUM_REQUESTS = 500
LOGPROB_TOLERANCE = 0.002
"""Sums come in another order in batches of another size, and batches differ from run to run."""
_CHECKED_AGAIN = 3
"""Every third request."""


@dataclass(frozen=True, slots=True)
class Deployment:
    """A cluster, and which requests it is sent: every `stride`-th from `first` on."""

    name: str
    options: tuple[str, ...]
    first: int
    stride: int


_PAIR = ("--prefill", "1", "--decode", "1")
_ELASTIC = ("--workers", "2", "--chunk-tokens", "64")
_ALONE = ("--prefill", "0", "--decode", "1", "--local-prefill-tokens", "unlimited")
DEPLOYMENTS = (
    Deployment("shm", (*_PAIR, "--transport", "shm"), 0, 2),
    Deployment("tcp", (*_PAIR, "--transport", "tcp"), 1, 2),
    Deployment(
        "colocated",
        (*_ALONE, "--kv-blocks", "56", "--chunk-tokens", "64"),
        0,
        _CHECKED_AGAIN,
    ),
    Deployment("elastic", _ELASTIC, 1, _CHECKED_AGAIN),
)


@dataclass(slots=True)
class Run:
    """What one checkout said."""

    answers: Answers
    num_preemptions: int = 0
    """Of the small pool: shows that sequences were computed anew."""


CONCURRENCY = 16
READY_TIMEOUT_S = 120.0
REQUEST_TIMEOUT_S = 1800.0
"""Longer than a whole run on a busy machine: a request of low priority waits in the small pool for most others."""
_LOGPROB_DIGITS = 4

Answer = dict[str, Any]
Answers = dict[str, Answer]
"""By request name."""


async def ask_cluster(target: str, requests: Sequence[RandomRequest]) -> tuple[Answers, int]:
    """Answers by request name, and how often the cluster preempted."""
    answers: Answers = {}
    left = deque(requests)
    async with AsyncClient(target) as client:
        await client.wait_ready(timeout_s=READY_TIMEOUT_S)

        async def caller() -> None:
            while left:
                request = left.popleft()
                answers[request.name] = await _ask(client, request)

        async with asyncio.TaskGroup() as tasks:
            for _ in range(CONCURRENCY):
                tasks.create_task(caller())
        status = await client.status()
    return answers, sum(worker.load.preemptions for worker in status.workers)


async def _ask(client: AsyncClient, request: RandomRequest) -> Answer:
    """A refusal is an answer too."""
    options = dict(request.options)
    prompt = options.pop("prompt", None)
    try:
        if not request.streams:
            done = await client.complete(prompt, timeout_s=REQUEST_TIMEOUT_S, **options)
            return _answer(done.choices, done.usage.prompt_tokens)
        updates = [each async for each in client.generate(prompt, timeout_s=REQUEST_TIMEOUT_S, **options)]
    except TandemError as error:
        return {"error": error.reason.value}
    usage = updates[-1].usage
    return _answer(updates, None if usage is None else usage.prompt_tokens)


def _answer(parts: Sequence[GenerationUpdate | Choice], num_prompt_tokens: int | None) -> Answer:
    answer: Answer = {
        "token_ids": [token_id for part in parts for token_id in part.token_ids],
        "text": "".join(part.text for part in parts),
        "finish_reason": parts[-1].finish_reason,
        "matched_stop": parts[-1].matched_stop,
        "num_prompt_tokens": num_prompt_tokens,
    }
    logprobs = [_rounded(each) for part in parts for each in part.logprobs]
    return answer | {"logprobs": logprobs} if logprobs else answer


def _rounded(each: TokenLogprobs) -> list[Any]:
    """[id, log-probability, [[id, log-probability], …]]."""
    top = [[token_id, round(value, _LOGPROB_DIGITS)] for token_id, value in each.top]
    return [each.token_id, round(each.logprob, _LOGPROB_DIGITS), top]


def ask_all(requests: Sequence[RandomRequest]) -> Run:
    """Starts one cluster after the other."""
    run = Run({})
    for deployment in DEPLOYMENTS:
        chosen = requests[deployment.first :: deployment.stride]
        print(f"{deployment.name}: {len(chosen)} requests …", file=sys.stderr, flush=True)
        with serve(MODEL, *deployment.options, "--max-priority", str(MAX_PRIORITY)) as cluster:
            answers, preemptions = asyncio.run(ask_cluster(cluster.target, chosen))
        run.answers |= {f"{deployment.name}/{name}": answer for name, answer in answers.items()}
        run.num_preemptions += preemptions
    return run


def difference(before: Answer, after: Answer) -> str | None:
    """What differs first, in words; None = nothing that matters."""
    for key in sorted((before.keys() | after.keys()) - {"logprobs"}):
        if before.get(key) != after.get(key):
            return f"{key}: {before.get(key)!r} became {after.get(key)!r}"
    left, right = before.get("logprobs", []), after.get("logprobs", [])
    if len(left) != len(right):
        return f"logprobs: {len(left)} became {len(right)}"
    for index, (one, other) in enumerate(zip(left, right, strict=True)):
        if not _alike(one, other):
            return f"logprobs of token {index}: {one} became {other}"
    return None


def _alike(one: Sequence[Any], other: Sequence[Any]) -> bool:
    """Equal tokens and near values. Alternatives are compared by rank: near ones may change places."""
    return (
        one[0] == other[0]
        and len(one[2]) == len(other[2])
        and abs(one[1] - other[1]) <= LOGPROB_TOLERANCE
        and all(abs(a[1] - b[1]) <= LOGPROB_TOLERANCE for a, b in zip(one[2], other[2], strict=True))
    )


def differences(before: Mapping[str, Answer], after: Mapping[str, Answer]) -> dict[str, str]:
    """What differs, by name."""
    found = dict.fromkeys(before.keys() ^ after.keys(), "only one of both has it")
    for name in before.keys() & after.keys():
        what = difference(before[name], after[name])
        if what is not None:
            found[name] = what
    return dict(sorted(found.items()))


def disagreements(answers: Mapping[str, Answer]) -> dict[str, str]:
    """Where the cluster that checks again said something else than the one that was asked first."""
    first: Answers = {}
    again: Answers = {}
    for name, answer in answers.items():
        deployment, _, request = name.partition("/")
        (again if deployment == "colocated" else first)[request] = answer
    return differences({name: first[name] for name in again}, again)


def write_record(path: Path, requests: Sequence[RandomRequest], run: Run) -> None:
    """One line per answer."""
    head = {
        "date": today(),
        "machine": describe_machine(),
        "requests_digest": digest(requests),
        "num_preemptions": run.num_preemptions,
    }
    opening = json.dumps(head, indent=2).removesuffix("\n}")
    lines = (
        f"    {json.dumps(name)}: {json.dumps(answer, separators=(',', ':'))}"
        for name, answer in sorted(run.answers.items())
    )
    path.write_text(f'{opening},\n  "answers": {{\n' + ",\n".join(lines) + "\n  }\n}\n")


def _report(title: str, found: Mapping[str, str]) -> None:
    print(f"{title}: {len(found)}")
    for name, what in found.items():
        print(f"  {name}: {what}")


def main() -> int:
    """Records or compares; 1 if anything differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--record", type=Path, metavar="FILE")
    action.add_argument("--compare", type=Path, metavar="FILE")
    args = parser.parse_args()
    requests = make_requests(NUM_REQUESTS, SEED)
    known = None if args.compare is None else json.loads(args.compare.read_text())
    if known is not None and known["requests_digest"] != digest(requests):
        print("the requests are not those of the record: the demo's text or this script has changed", file=sys.stderr)
        return 1
    run = ask_all(requests)
    disagreed = disagreements(run.answers)
    _report("answers that differ between clusters", disagreed)
    if known is None:
        write_record(args.record, requests, run)
        return 1 if disagreed else 0
    differing = differences(known["answers"], run.answers)
    _report(f"answers that differ from the record, of {len(known['answers'])}", differing)
    return 1 if disagreed or differing else 0


if __name__ == "__main__":
    sys.exit(main())
