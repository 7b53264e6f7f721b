"""A worker whose model two processes share: the tokens of one process, and its end when a follower is lost."""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import replace
from multiprocessing import Pipe
from pathlib import Path

import pytest
import torch

from bench.support.cluster import eventually
from decode_worker.worker import new_decode_worker
from engine import loading, ranks
from engine.engine_thread import EngineBroken
from engine.guides import Guides
from engine.loading import Engine, load_engine
from engine.rank_link import StepSlots
from engine.ranks import RankTask
from kernels.shared_group import SharedGroup, create_group_memory
from models.files.checkpoint import read_checkpoint
from models.grammar import GrammarCompiler
from shell.config import DecodeConfig, WorkerConfig
from shell.cores import CoreShare
from tandem.errors import CheckpointError, ConfigError, InternalError
from tandem.option_values import SizedFolder
from tandem.types import (
    ChoiceSpec,
    Constraint,
    GroupSpec,
    Handle,
    Language,
    RequestId,
    SamplingParams,
    TokenId,
    TokenLogprobs,
)
from tests.heard_router import HeardRouter
from tests.recorded_events import RecordedWorker
from tests.unit.decode_worker.conftest import FakeReceiver
from tests.worker_parts import parts_of
from worker.core import Worker

DEMO = read_checkpoint("demo")
OPTIONS = WorkerConfig(model="demo", device="cpu", dtype="float32", max_seqs=8, kv_blocks=32, block_size=4)
NUM_REQUESTS = 24
PATIENCE_S = 60.0
"""Other processes compute beside a test."""

pytestmark = pytest.mark.native


@contextmanager
def engine_of(size: int, **options: object) -> Iterator[Engine]:
    engine = load_engine(replace(OPTIONS, tensor_parallel=size, **options))
    try:
        yield engine
    finally:
        engine.close()


@asynccontextmanager
async def worker_on(
    engine: Engine, recorded: RecordedWorker | None = None
) -> AsyncIterator[tuple[Worker, asyncio.Task[None]]]:
    guides = Guides(GrammarCompiler.of(DEMO))
    sizes = {"max_seqs": 8, "chunk_tokens": 24, "max_tokens": 128, "vocab_size": DEMO.vocab_size}
    events = (recorded or RecordedWorker()).events
    parts = parts_of(engine.thread, engine.cache, **sizes, guides=guides, events=events)
    worker = new_decode_worker(parts, FakeReceiver(), DecodeConfig(local_prefill_tokens=None), first_guess_tokens=1)
    running = asyncio.create_task(worker.run())
    try:
        yield worker, running
    finally:
        running.cancel()
        with suppress(asyncio.CancelledError, EngineBroken):
            await running
        guides.close()


def random_requests(seed: int) -> list[GroupSpec]:
    """Of all kinds, many of which begin alike; together too many for the pool."""
    rng = random.Random(seed)
    stems = [[TokenId(rng.randrange(1, 200)) for _ in range(24)] for _ in range(3)]
    kinds: list[dict[str, object]] = [
        {"temperature": 0.0},
        {"temperature": 0.8, "seed": 7, "top_k": 20},
        {"temperature": 0.0, "repetition_penalty": 1.3, "logprobs": 2},
        {"temperature": 0.0, "prompt_logprobs": 2},
        {"temperature": 0.0, "beam_width": 3},
        {"temperature": 0.0, "constraint": Constraint(Language.REGEX, ("[a-z]{1,20}",))},
    ]
    specs = []
    for number in range(NUM_REQUESTS):
        kind = kinds[number % len(kinds)]
        prompt = (*rng.choice(stems)[: rng.randrange(1, 24)], TokenId(rng.randrange(1, 200)))
        params = SamplingParams(max_tokens=rng.randrange(12, 30), end_token_ids=DEMO.eos_token_ids, **kind)  # type: ignore[arg-type]
        choices = tuple(map(ChoiceSpec, range(1 if "constraint" in kind else rng.randrange(1, 4))))
        specs.append(GroupSpec(RequestId(f"r{number}"), prompt, params, choices))
    return specs


async def answers(
    engine: Engine, specs: Sequence[GroupSpec]
) -> tuple[dict[object, list[TokenId]], list[TokenLogprobs]]:
    """By handle and choice; and what prompts score."""
    router, recorded = HeardRouter(), RecordedWorker()
    async with worker_on(engine, recorded) as (worker, running):
        for number, spec in enumerate(specs):
            router.num_choices[Handle(number)] = len(spec.choices)
            worker.reserve(router, Handle(number), spec, local_prefill=True)
            if number % 12 == 11:
                await router.until(lambda least=number - 11: len(router.ended) >= least or running.done())
        await router.until(lambda: len(router.ended) == len(specs) or running.done())
        if running.done():
            await running
        await worker.drained()
        worker.check_idle()
    assert not router.errors
    scores = [each for number in sorted(router.prompt_scores) for each in router.prompt_scores[number]]
    return router.choices, scores, sum(each.names.count("Preempted") for each in recorded.sequences)


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "LEAST_TIMEOUT_S", PATIENCE_S)


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize(("kv_dtype", "backend"), [("auto", "cpu"), ("int8", "cpu"), ("auto", "reference")])
def test_two_ranks_answer_as_one_process(kv_dtype: str, backend: str) -> None:
    specs, found = random_requests(seed=3), []
    for size in (1, 2):
        with engine_of(size, kv_dtype=kv_dtype, attention_backend=backend) as engine:
            found.append(asyncio.run(answers(engine, specs)))
            assert engine.cache.counters.hit_tokens
    (expected, expected_scores, num_preempted), (choices, scores, _) = found
    assert num_preempted
    assert choices == expected
    assert [each.logprob for each in scores] == pytest.approx([each.logprob for each in expected_scores], abs=1e-4)


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("is_idle", [True, False])
def test_a_follower_that_is_lost_ends_the_engine_in_time(
    monkeypatch: pytest.MonkeyPatch, signum: signal.Signals, *, is_idle: bool
) -> None:
    monkeypatch.setattr(ranks, "LEAST_TIMEOUT_S", 5.0)
    long = GroupSpec(
        RequestId("r"), (TokenId(5),) * 9, SamplingParams(max_tokens=100, temperature=0.0), (ChoiceSpec(0),)
    )

    async def lose(engine: Engine) -> float:
        router = HeardRouter(num_choices={Handle(1): 1})
        async with worker_on(engine) as (worker, running):
            if not is_idle:
                worker.reserve(router, Handle(1), long, local_prefill=True)
                await router.until(lambda: (Handle(1), 0) in router.choices)
            assert engine.ranks is not None
            os.kill(engine.ranks.pids[0], signum)
            lost_s = time.monotonic()
            if is_idle:
                worker.reserve(router, Handle(1), long, local_prefill=True)
            with pytest.raises(EngineBroken):
                await running
            return time.monotonic() - lost_s

    with engine_of(2) as engine:
        seconds = asyncio.run(lose(engine))
        assert seconds < (5 if signum is signal.SIGKILL else 30)


def test_followers_end_with_the_engine_and_say_that_they_do() -> None:
    with engine_of(2) as engine:
        assert engine.ranks is not None
        (pid,), (end,) = engine.ranks.pids, engine.ranks.ends
        (chosen,) = [each for each in engine.decisions if each.name == "ranks"]
        assert chosen.value.startswith(f"2, each with {32 * engine.layout.block_bytes // 2} bytes of KV")
        assert engine.kv_cache.layout.num_kv_heads * 2 == engine.layout.num_kv_heads
        assert engine.ranks.parts[0].blocks_view.shape == engine.kv_cache.blocks_view.shape
        assert end > 0
        for signum, found in ((signal.SIGSTOP, 1), (signal.SIGCONT, None)):
            os.kill(pid, signum)
            assert eventually(lambda found=found: engine.ranks.find_stopped() == found)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_stop_that_is_asked_of_all_processes_at_once_is_rank_0s_to_follow() -> None:
    """So service managers and terminals ask; rank 0 finishes its requests first."""
    (spec,) = random_requests(seed=3)[:1]
    with engine_of(2) as engine:
        assert engine.ranks is not None
        for signum in (signal.SIGTERM, signal.SIGINT):
            os.kill(engine.ranks.pids[0], signum)
        assert asyncio.run(answers(engine, [spec]))[0]


def test_a_follower_that_stands_still_while_it_starts_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    start = ranks._start

    def start_and_stop(*args: int) -> subprocess.Popen[bytes]:
        process = start(*args)
        process.send_signal(signal.SIGSTOP)
        return process

    monkeypatch.setattr(ranks, "_start", start_and_stop)
    monkeypatch.setattr(ranks, "LEAST_TIMEOUT_S", 0.2)
    with pytest.raises(InternalError, match="rank 1 stands still"):
        load_engine(replace(OPTIONS, tensor_parallel=2))


def test_a_follower_that_cannot_load_says_why_without_a_traceback(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(DEMO.path, tmp_path / "bad")
    os.truncate(tmp_path / "bad" / "model.safetensors", 100)
    slots, memory, (link, theirs) = StepSlots.create(), create_group_memory(2), Pipe()
    process = ranks._start(theirs.fileno(), slots, memory)
    try:
        link.send(
            RankTask(replace(OPTIONS, model=str(tmp_path / "bad"), tensor_parallel=2), 1, CoreShare((0,), 1), 5.0)
        )
        link.recv_bytes()
        SharedGroup(memory, 0, 2, PATIENCE_S, PATIENCE_S)
        assert process.wait(PATIENCE_S) == 1
    finally:
        process.kill()
        for descriptor in (slots, memory):
            os.close(descriptor)
    said = capfd.readouterr().err
    assert "model.safetensors" in said
    assert "Traceback" not in said


def test_a_follower_that_loaded_other_weights_than_rank_0_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(DEMO.path, tmp_path / "other")
    weights = tmp_path / "other" / "model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    start, other = loading._start_ranks, {"model": str(tmp_path / "other")}
    monkeypatch.setattr(loading, "_start_ranks", lambda config, shares: start(replace(config, **other), shares))
    with pytest.raises(CheckpointError, match="rank 1 loaded another model than rank 0"):
        load_engine(replace(OPTIONS, tensor_parallel=2))


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"tensor_parallel": 3}, "3 is none of 1, 2, 4, 8"),
        ({"tensor_parallel": 2, "host_cache_bytes": 1 << 20}, "leave that out, or give 1"),
        ({"tensor_parallel": 2, "disk_cache": SizedFolder("/tmp", 1 << 20)}, "leave that out, or give 1"),
    ],
)
def test_what_several_ranks_cannot_do_is_refused_by_name(options: dict[str, object], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        load_engine(replace(OPTIONS, **options))  # type: ignore[arg-type]


@pytest.mark.parametrize("size", [1, 2])
def test_ranks_on_a_gpu_are_refused_by_name(size: int) -> None:
    with pytest.raises(ConfigError, match="--tensor-parallel: ranks compute on CPUs of Linux alone"):
        ranks.check_ranks(replace(OPTIONS, tensor_parallel=size), torch.device("cuda", 0))


def test_one_rank_alone_takes_tiers() -> None:
    with engine_of(1, host_cache_bytes=1 << 20) as engine:
        assert engine.ranks is None
        assert engine.tier is not None
