"""From a checkpoint folder to the reference's tokens, and what is refused on the way."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from engine.kv_cache import KvCache
from engine.loading import Engine, EngineRole, ladder_of, load_engine, resolve_device
from engine.memory import pool_decision
from engine.sequence import Sequence
from engine.step import Step
from engine.warm_up import StepSizes
from kernels.cpu.library import max_threads
from models.decoder import Decoder
from shell.config import WorkerConfig
from tandem.errors import CheckpointError, ConfigError
from tandem.kv_layout import DType, QuantDType
from tandem.option_values import SizedFolder

NUM_NEW_TOKENS = 12
CPU = torch.device("cpu")
MIB = 1 << 20


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=160,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
    )
    path = tmp_path_factory.mktemp("llama")
    LlamaForCausalLM(config).float().save_pretrained(path)
    return path


@pytest.fixture
def options(checkpoint: Path) -> WorkerConfig:
    return WorkerConfig(model=str(checkpoint), device="cpu", dtype="float32", threads=1, max_seqs=4)


async def complete(engine: Engine, seq: Sequence, chunk_tokens: int) -> list[int]:
    while not seq.is_finished:
        num_tokens = min(seq.num_remaining_tokens, chunk_tokens)
        seq.add_blocks(engine.pool.allocate(seq.blocks_wanted(num_tokens, engine.layout.block_size)))
        result = await engine.thread.launch(Step((seq.schedule(num_tokens),)))
        for ((token,),) in filter(None, result.outputs):
            seq.append_token(token.token_id)
    engine.pool.release(seq.take_blocks())
    return list(seq.output_token_ids)


def _team_members() -> int:
    """Threads of this process that compute for an engine's."""
    names = []
    for path in Path("/proc/self/task").glob("*/comm"):
        with suppress(OSError):  # it has ended meanwhile
            names.append(path.read_text())
    return names.count("tandem-team\n")


@pytest.mark.native
async def test_native_steps_have_their_threads_to_themselves_and_end_them_with_the_engine(
    options: WorkerConfig, make_seq: Callable[..., Sequence]
) -> None:
    before = _team_members()
    engine = load_engine(replace(options, attention_backend="cpu", threads=3))
    executor = engine.thread._executor
    try:
        await complete(engine, make_seq(tuple(range(3, 36)), max_tokens=3), 64)
        assert executor.submit(torch.get_num_threads).result() == 1
        assert executor.submit(max_threads).result() == 3
        _wait_for(lambda: _team_members() == before + 2)
    finally:
        engine.close()
    _wait_for(lambda: _team_members() == before)


def _wait_for(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.001)


@pytest.mark.parametrize(("block_size", "chunk_tokens", "shared"), [(1, 64, False), (4, 3, True), (16, 7, False)])
async def test_the_engine_gives_the_tokens_of_transformers(
    options: WorkerConfig,
    make_seq: Callable[..., Sequence],
    block_size: int,
    chunk_tokens: int,
    shared: bool,
) -> None:
    prompt = tuple(range(3, 36))
    reference = LlamaForCausalLM.from_pretrained(options.model, dtype=torch.float32)
    expected = reference.generate(
        torch.tensor([prompt]), do_sample=False, min_new_tokens=NUM_NEW_TOKENS, max_new_tokens=NUM_NEW_TOKENS
    )[0, len(prompt) :].tolist()
    engine = load_engine(replace(options, block_size=block_size), EngineRole(shared_kv=shared))
    try:
        engine.kv_cache.fill_poison()
        assert await complete(engine, make_seq(prompt, max_tokens=NUM_NEW_TOKENS), chunk_tokens) == expected
        engine.pool.assert_idle()
    finally:
        engine.close()


@pytest.mark.parametrize("kv_dtype", list(QuantDType))
async def test_over_quantized_kv_tokens_do_not_depend_on_blocks_and_chunks(
    options: WorkerConfig, make_seq: Callable[..., Sequence], kv_dtype: QuantDType
) -> None:
    prompt, tokens = tuple(range(3, 36)), []
    for block_size, chunk_tokens, shared in [(1, 64, False), (4, 3, True), (16, 7, False)]:
        engine = load_engine(
            replace(options, block_size=block_size, kv_dtype=kv_dtype.value), EngineRole(shared_kv=shared)
        )
        try:
            assert engine.layout.dtype is kv_dtype
            assert engine.model.dtype is DType.FLOAT32
            engine.kv_cache.fill_poison()
            tokens.append(await complete(engine, make_seq(prompt, max_tokens=NUM_NEW_TOKENS), chunk_tokens))
            engine.pool.assert_idle()
        finally:
            engine.close()
    assert tokens == [tokens[0]] * 3


def test_quantized_kv_leaves_room_for_more_blocks(options: WorkerConfig) -> None:
    sizes = []
    for kv_dtype in ("auto", "int8"):
        engine = load_engine(replace(options, dtype="bfloat16", kv_memory=100_000, kv_dtype=kv_dtype))
        sizes.append(engine.pool.num_blocks)
        engine.close()
    assert sizes[1] == 100_000 // (16 * 2 * 2 * 2 * (8 + 4))
    assert sizes[1] > 1.3 * sizes[0]  # heads of 8 elements: the scale is a third


async def test_an_engine_says_what_it_is_and_steps_on_its_thread(options, make_seq) -> None:
    engine = load_engine(options)
    try:
        assert engine.layout.dtype is DType.FLOAT32
        assert engine.pool.num_blocks == engine.kv_cache.num_blocks == 4 * 128 // 16
        assert engine.sizes.max_sequence_tokens == 128
        assert len(engine.model.fingerprint) >= 32
        seq = make_seq((1, 2, 3))
        seq.add_blocks(engine.pool.allocate(1))
        result = await engine.thread.launch(Step((seq.schedule(3),)))
        assert len(result.outputs[0]) == 1
        assert engine.thread.num_steps == 1
    finally:
        engine.close()
        engine.close()


def test_what_was_chosen_is_told_with_its_reason_and_its_option(options: WorkerConfig) -> None:
    engine = load_engine(replace(options, kv_blocks=8, max_seqs=0))
    engine.close()
    told = {each.name: each for each in engine.decisions}
    assert (told["KV pool"].value[:8], told["KV pool"].why) == ("8 blocks", "--kv-blocks says so")
    assert (told["sequences in a batch"].value, told["sequences in a batch"].force) == ("64", "--max-seqs")
    assert told["chunks of prompts"].why == "by device: cpu"
    assert told["kernels"].value == engine.backend_name


def test_a_pool_that_holds_a_whole_batch_says_so_and_one_that_does_not_names_the_share(options: WorkerConfig) -> None:
    engine = load_engine(options)
    engine.close()
    pool = next(each for each in engine.decisions if each.name == "KV pool")
    assert pool.why == "all sequences of a batch fit at their longest: 512 tokens"
    assert "machine's free memory" in pool_decision(options, engine.layout, CPU, 7, 512).why
    assert "90% of the GPU's" in pool_decision(options, engine.layout, torch.device("cuda", 0), 7, 512).why


def test_a_small_pool_bounds_the_longest_sequence(options: WorkerConfig) -> None:
    engine = load_engine(replace(options, kv_blocks=3))
    assert engine.sizes.max_sequence_tokens == 48
    engine.close()


@pytest.mark.parametrize(
    ("changes", "option"),
    [
        ({"kv_blocks": 4, "kv_memory": 4096}, "--kv-blocks"),
        ({"kv_blocks": 1 << 50}, "--kv-memory"),
        ({"kv_memory": 1}, "--kv-memory"),
        ({"device": "tpu"}, "--device"),
        ({"device": "meta"}, "--device"),
        ({"device": "cuda:99"}, "--device"),
        ({"dtype": "float8"}, "--dtype"),
        ({"attention_backend": "abacus"}, "--attention-backend"),
        ({"cpu_tier": "abacus"}, "--cpu-tier"),
        ({"disk_cache": SizedFolder("/", MIB)}, "--disk-cache"),
        ({"disk_cache": SizedFolder("/", 1), "host_cache_bytes": MIB}, "--disk-cache"),
        ({"host_cache_bytes": MIB, "prefix_cache": False}, "--host-cache-memory"),
        ({"disk_cache": SizedFolder("/no", MIB), "host_cache_bytes": MIB}, "--disk-cache"),
        ({"disk_cache": SizedFolder("/dev/null", MIB), "host_cache_bytes": MIB}, "--disk-cache"),
    ],
)
def test_a_bad_option_is_refused_by_name(options: WorkerConfig, changes: dict[str, object], option: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_engine(replace(options, **changes))
    assert caught.value.field == option


LARGEST = StepSizes(chunk_tokens=2048, max_seqs=256, context_tokens=9000)
GPU = torch.device("cuda", 0)


def shapes_of(
    config: WorkerConfig,
    kernels_name: str,
    device: torch.device = GPU,
    *,
    prefills_only: bool = False,
    waits: bool = False,
) -> tuple[int, int] | None:
    """Largest captured batch of decodes, and most tokens of other steps."""
    decoder: Any = object.__new__(type("Quick", (Decoder,), {"waits_for_device": waits}))
    model: Any = SimpleNamespace(device=device, decoder=decoder)
    ladder = ladder_of(config, EngineRole(prefills_only=prefills_only), model, kernels_name, LARGEST)
    return None if ladder is None else (max(ladder.batch_sizes, default=0), ladder.rungs[-1])


def test_steps_of_every_size_that_a_worker_can_form_are_captured() -> None:
    config = WorkerConfig()
    assert shapes_of(config, "triton") == shapes_of(config, "flash_attn") == (256, 2048)
    assert shapes_of(replace(config, cuda_graph_seqs=8), "triton") == (8, 2048)
    assert shapes_of(config, "triton", prefills_only=True) == (0, 2048)
    assert shapes_of(config, "flash_attn", prefills_only=True) == (0, 1024)


def test_nothing_is_captured_where_it_cannot_or_must_not_be() -> None:
    config = WorkerConfig()
    assert shapes_of(config, "triton", CPU) is shapes_of(config, "reference") is None
    assert shapes_of(config, "triton", waits=True) is shapes_of(replace(config, cuda_graph_seqs=0), "triton") is None


def test_what_was_made_is_given_back_if_the_rest_cannot_be(options: WorkerConfig, monkeypatch) -> None:
    made: list[KvCache] = []
    create = KvCache.create
    monkeypatch.setattr(KvCache, "create", lambda *args, **kwargs: made.append(create(*args, **kwargs)) or made[-1])
    with pytest.raises(ConfigError):
        load_engine(replace(options, disk_cache=SizedFolder("/no", MIB), host_cache_bytes=MIB))
    (cache,) = made
    with pytest.raises(ValueError, match="closed"):
        cache.blocks_view.numel()


def test_a_folder_that_is_no_checkpoint_is_refused(options: WorkerConfig, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError):
        load_engine(replace(options, model=str(tmp_path)))


@pytest.mark.parametrize(
    ("num_gpus", "name", "expected"),
    [(0, "auto", "cpu"), (2, "auto", "cuda:0"), (2, "cpu", "cpu"), (2, "cuda", "cuda:0"), (2, "cuda:1", "cuda:1")],
)
def test_auto_is_the_first_gpu_if_there_is_one(
    monkeypatch: pytest.MonkeyPatch, num_gpus: int, name: str, expected: str
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    assert str(resolve_device(name)) == expected


def test_an_engine_with_a_ring_opens_the_native_kernels_while_it_loads(
    options: WorkerConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hand-offs hash the ring's rows with them: opened at the first one, a compiler would hold up the worker's loop."""
    opened: list[str] = []
    monkeypatch.setattr("engine.loading.library.obstacle", lambda: opened.append(threading.current_thread().name))
    load_engine(replace(options, attention_backend="reference"), EngineRole(staged_kv=True)).close()
    assert any(name.startswith("tandem-engine") for name in opened)
