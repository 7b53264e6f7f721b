from pathlib import Path
from typing import Any

import pytest
import torch

from bench.ceilings import Ceilings
from bench.interference import Interference
from bench.peers.bars import (
    Bar,
    Roof,
    bars,
    decode_documents,
    interference_documents,
    prefill_documents,
    served_documents,
)
from bench.peers.engines import WORKLOADS, Measured, Results
from bench.peers.model import PEER_SHAPES
from bench.peers.page import bars_table, section
from bench.peers.served import Served, ServedShape
from models.config import load_model_config

CEILINGS = Ceilings("cpu", 2, 50.0, 30.0, 1.0, 0.25)


@pytest.fixture(scope="module")
def roof(tmp_path_factory: pytest.TempPathFactory) -> Roof:
    folder: Path = tmp_path_factory.mktemp("shape")
    PEER_SHAPES["135m"].config().save_pretrained(folder)
    text = (folder / "config.json").read_text()
    (folder / "config.json").write_text(text.replace('"architectures": null', '"architectures": ["LlamaForCausalLM"]'))
    return Roof(CEILINGS, load_model_config(folder), torch.bfloat16)


def documents(roof: Roof, names: tuple[str, ...]) -> dict[str, Any]:
    """Tandem takes 1 s a step, computes prompts in 1 s; each next engine takes twice as long."""
    results: Results = {
        workload.name: {
            name: Measured([2.0**rank] * 2, {512 if name == "tandem" else 4096: [2.0**rank]}, [1, 2])
            for rank, name in enumerate(names)
        }
        for workload in WORKLOADS
    }
    servers = {"tandem": "tandem disaggregated", "vllm": "vllm"}
    served = {servers[name]: Served([8.0 / 2**rank], [0.1], [0.2], [0.1], [0.5]) for rank, name in enumerate(names)}
    burst = {servers[name]: Interference([0.1], [0.15], [0.2 * 2**rank]) for rank, name in enumerate(names)}
    return {
        "decode": decode_documents(WORKLOADS, results, roof),
        "prefill": prefill_documents(WORKLOADS, results, roof),
        "served": served_documents(served),
        "interference": interference_documents(burst),
    }


def bars_of(found: dict[str, Any]) -> list[Bar]:
    return bars(found["decode"], found["prefill"], found["served"], found["interference"])


def test_ratios_are_held_against_their_bars(roof: Roof) -> None:
    found = {bar.name: bar for bar in bars_of(documents(roof, ("tandem", "vllm")))}
    assert found["decode step 16 × 256, times vLLM's"].by_median == pytest.approx(0.5)
    assert found["decode step 16 × 256, times vLLM's"].met
    assert found["prefill 8 × 2048, times vLLM's"].by_median == pytest.approx(2.0)
    assert found["served tokens/s, times vLLM's"].met
    assert found["inter-token p99 in the burst, times the quiet p99"].by_median == pytest.approx(1.5)
    assert found["long prompts' time to first token, times vLLM's"].by_median == pytest.approx(0.5)
    assert found["decode step 1 × 256, times the memory limit"].met is False


def test_without_vllm_only_the_machine_is_a_bar(roof: Roof) -> None:
    found = bars_of(documents(roof, ("tandem",)))
    assert [bar.name for bar in found if bar.met is not None] == [
        "decode step 1 × 256, times the memory limit",
        "inter-token p99 in the burst, times the quiet p99",
    ]
    assert "not measured" in bars_table([bar.document() for bar in found])


def test_the_memory_limit_of_one_seq_is_weights_and_kv_once(roof: Roof) -> None:
    cost = roof.decode(WORKLOADS[0])
    assert cost.num_bytes == pytest.approx(269e6 + 280 * 30 * 2 * 3 * 64 * 2, rel=0.01)
    assert cost.is_memory_bound(CEILINGS)


@pytest.mark.parametrize("names", [("tandem",), ("tandem", "vllm")])
def test_the_section_shows_what_was_measured_and_says_what_was_not(roof: Roof, names: tuple[str, ...]) -> None:
    found = documents(roof, names)
    missing = {} if "vllm" in names else {"vllm": "no vLLM venv given"}
    text = "\n".join(
        section(
            {
                "settings": {
                    "shape": "135m",
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
                "engines": {"tandem": {"tandem": "1"}},
                "not_measured": missing,
                "first_tokens_equal": {},
                "ceilings": {"read_gb_s": 50.0, "bf16_tflop_s": 1.0},
                "bars": [bar.document() for bar in bars_of(found)],
                **found,
            }
        )
    )
    assert ("vllm: not measured: no vLLM venv given" in text) == bool(missing)
    assert "4,096 (4,096) at 512" in text
    assert f"{ServedShape().streams} × (256 + 64)" in text
