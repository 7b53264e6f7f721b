from collections.abc import Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path

import pytest
import torch

from bench.ceilings import Ceilings
from bench.interference import Interference
from bench.peers.bars import (
    Documents,
    Roof,
    bars,
    busy_documents,
    decode_documents,
    interference_documents,
    prefill_documents,
    served_documents,
    step_documents,
)
from bench.peers.contenders import CONTENDERS
from bench.peers.engines import QUANTIZED_WORKLOADS, WORKLOADS, Measured, Results, Workload
from bench.peers.page import bars_table, section
from bench.peers.served import Served, ServedShape
from bench.support.checkpoints import PEER_SHAPES
from models.config import load_model_config

CEILINGS = Ceilings("cpu", 2, 50.0, 30.0, 1.0, 0.25)


@pytest.fixture(scope="module")
def roof(tmp_path_factory: pytest.TempPathFactory) -> Roof:
    folder: Path = tmp_path_factory.mktemp("shape")
    PEER_SHAPES["135m"].config().save_pretrained(folder)
    text = (folder / "config.json").read_text()
    (folder / "config.json").write_text(text.replace('"architectures": null', '"architectures": ["LlamaForCausalLM"]'))
    return Roof({workload.name: [CEILINGS] for workload in WORKLOADS}, load_model_config(folder), torch.bfloat16)


def measured(names: tuple[str, ...], workloads: Sequence[Workload]) -> Results:
    """The first of `names` takes 1 s a step and for its prompts; each next one twice as long."""
    return {
        workload.name: {
            name: Measured(
                [2.0**rank] * 2, {CONTENDERS[name].budgets[0 if name == "tandem" else -1]: [2.0**rank]}, [1, 2]
            )
            for rank, name in enumerate(names)
        }
        for workload in workloads
    }


def documents(roof: Roof, names: tuple[str, ...] = ("tandem",)) -> Documents:
    """`names` as in `measured`, and servers of those that have one."""
    results = measured(names, WORKLOADS)
    servers = {"tandem": ("tandem colocated", "tandem disaggregated"), "vllm": ("vllm",)}
    ranks = {server: rank for rank, name in enumerate(names) for server in servers.get(name, ())}
    return Documents(
        decode=decode_documents(WORKLOADS, results, roof),
        prefill=prefill_documents(WORKLOADS, results, roof),
        served=served_documents(
            {name: Served([8.0 / 2**rank], [0.1], [0.2], [0.1], [0.5]) for name, rank in ranks.items()}
        ),
        interference=interference_documents(
            {name: Interference([0.1], [0.15], [0.2 * 2**rank]) for name, rank in ranks.items()}
        ),
    )


def values(found: Documents) -> dict[str, float | None]:
    """By the bar's name."""
    return {bar.name: bar.by_median for bar in bars(found)}


def test_ratios_are_held_against_their_bars(roof: Roof) -> None:
    found = {bar.name: bar for bar in bars(documents(roof, ("tandem", "vllm", "llama.cpp")))}
    assert found["decode step 16 × 256, times vLLM's"].by_median == pytest.approx(0.5)
    assert found["decode step 16 × 256, times vLLM's"].met
    assert found["decode step 1 × 256, times llama.cpp's"].by_median == pytest.approx(0.25)
    assert found["prefill 8 × 2048, times vLLM's"].by_median == pytest.approx(2.0)
    assert found["served tokens/s, colocated, times vLLM's"].met
    assert found["inter-token p99 in the burst, times the quiet p99"].by_median == pytest.approx(1.5)
    assert found["long prompts' time to first token, times vLLM's"].by_median == pytest.approx(0.5)
    assert found["decode step 1 × 256, times the roofline"].met is False


def test_one_seq_has_bars_of_its_own(roof: Roof) -> None:
    limits = {bar.name: bar.limit for bar in bars(documents(roof))}
    assert limits["decode step 1 × 256, times the roofline"] == 1.5
    assert limits["decode step 16 × 256, times the roofline"] == 1.7
    assert limits["decode step 1 × 256, times llama.cpp's"] == 1.1
    assert limits["decode step 16 × 256, times llama.cpp's"] == 1.0


def test_quantised_forms_are_held_against_ours_and_llama_cpp() -> None:
    names = ("tandem int4", "tandem int8", "tandem", "llama.cpp Q4_0", "llama.cpp Q8_0", "tandem int8 KV")
    found = values(Documents(quantized=step_documents(QUANTIZED_WORKLOADS, measured(names, QUANTIZED_WORKLOADS))))
    assert found["decode 1 × 256, tandem int8, times as fast as tandem"] == pytest.approx(2.0)
    assert found["decode 1 × 256, tandem int4, times as fast as tandem"] == pytest.approx(4.0)
    assert found["decode 1 × 256, tandem int4, times as fast as llama.cpp Q4_0"] == pytest.approx(8.0)
    assert found["decode 1 × 256, tandem int4, times as fast as llama.cpp Q4_K_M"] is None
    assert found["decode 8 × 2048, tandem int8 KV, times as fast as tandem"] == pytest.approx(1 / 8)


def test_a_busy_step_is_held_against_a_quiet_one() -> None:
    found = Documents(busy=busy_documents({"1 × 256": {"quiet": Measured([0.01]), "busy": Measured([0.03, 0.02])}}))
    assert values(found)["decode step 1 × 256 beside a busy process, times quiet"] == pytest.approx(2.5)


def test_without_peers_only_the_machine_is_a_bar(roof: Roof) -> None:
    found = bars(documents(roof))
    assert [bar.name for bar in found if bar.met is not None] == [
        *(f"decode step {workload.name}, times the roofline" for workload in WORKLOADS),
        "inter-token p99 in the burst, times the quiet p99",
    ]
    assert "not measured" in bars_table([bar.document() for bar in found])


def test_the_memory_limit_of_one_seq_is_weights_and_kv_once(roof: Roof) -> None:
    cost = roof.decode(WORKLOADS[0])
    assert cost.num_bytes == pytest.approx(269e6 + 280 * 30 * 2 * 3 * 64 * 2, rel=0.01)
    assert cost.is_memory_bound(CEILINGS)


def test_a_workload_is_held_against_what_the_machine_did_beside_it(roof: Roof) -> None:
    alone, several = WORKLOADS[:2]
    speeds = (25.0, 50.0, 100.0)
    shared = replace(
        roof, ceilings={**roof.ceilings, alone.name: [replace(CEILINGS, read_gb_s=each) for each in speeds]}
    )
    quiet = roof.document(alone, roof.decode(alone), took_s=0.05)
    found = shared.document(alone, shared.decode(alone), took_s=0.05)
    assert found["limit_ms"]["median"] == pytest.approx(quiet["memory_ms"])
    assert found["limit_ms"]["best"] == pytest.approx(quiet["memory_ms"] / 2)
    assert found["share"] == pytest.approx(quiet["memory_ms"] / 50)
    assert shared.document(several, shared.decode(several), None) == roof.document(several, roof.decode(several), None)


@pytest.mark.parametrize("names", [("tandem",), ("tandem", "vllm")])
def test_the_section_shows_what_was_measured_and_says_what_was_not(roof: Roof, names: tuple[str, ...]) -> None:
    found = replace(
        documents(roof, names),
        quantized=step_documents(QUANTIZED_WORKLOADS, measured(("tandem", "tandem int8"), QUANTIZED_WORKLOADS)),
        busy=busy_documents({"1 × 256": {"quiet": Measured([0.01]), "busy": Measured([0.03])}}),
    )
    missing = {} if "vllm" in names else {"vllm": "no vLLM venv given"}
    text = "\n".join(
        section(
            {
                "settings": {
                    "shape": "135m",
                    "tier": "avx2",
                    "threads": 2,
                    "rounds": 1,
                    "served": {"streams": 16, "prompt_tokens": 256, "output_tokens": 64},
                    "burst": {
                        "streams": 8,
                        "prompt_tokens": 128,
                        "output_tokens": 200,
                        "burst_prompts": 4,
                        "burst_prompt_tokens": 2048,
                        "burst_spacing_s": 0.3,
                    },
                },
                "engines": {"tandem": {"tandem": "1", "resident_mb": "512"}},
                "not_measured": missing,
                "first_tokens_equal": {},
                "ceilings": {workload.name: [asdict(CEILINGS)] for workload in WORKLOADS},
                "bars": [bar.document() for bar in bars(found)],
                **{each.name: getattr(found, each.name) for each in fields(found)},
            }
        )
    )
    assert ("vllm: not measured: no vLLM venv given" in text) == bool(missing)
    assert "4,096 (4,096) at 512" in text
    assert f"{ServedShape().streams} × (256 + 64)" in text
    assert "| 4,096 at 512, – |" in text  # vLLM was not measured at its default budget
    assert "the 135m shape, tier avx2 " in text
    assert "| memory, MB | 512 |" in text
    assert "| 1 × 256 | 10.00 (10.00) | 30.00 (30.00) |" in text
