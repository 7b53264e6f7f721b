"""What pages show of a GPU's records, and vLLM's loads, on an engine that computes nothing."""

from __future__ import annotations

import sys
from collections import Counter
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest

from bench.gpu_pages import gpu_table
from bench.served import steps_between
from bench.vllm_loads import run_load
from bench.workload import closed_loop

CALLERS, PROMPT, OUTPUT = 3, 8, 4


class Engine:
    """Gives each request a token a step, as vLLM's does: outputs hold all tokens so far."""

    def __init__(self) -> None:
        self.running: dict[str, int] = {}
        self.most = 0
        self.prompts: list[list[int]] = []

    def add_request(self, name: str, prompt: dict[str, list[int]], sampling: Any) -> None:
        assert sampling.max_tokens == OUTPUT
        self.prompts.append(prompt["prompt_token_ids"])
        self.running[name] = 0
        self.most = max(self.most, len(self.running))

    def step(self) -> list[Any]:
        outputs = []
        for name in list(self.running):
            self.running[name] = done = self.running[name] + 1
            tokens = SimpleNamespace(token_ids=range(done))
            outputs.append(SimpleNamespace(request_id=name, outputs=[tokens], finished=done == OUTPUT))
            if done == OUTPUT:
                del self.running[name]
        return outputs


@pytest.fixture
def theirs(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Figures of an engine on a clock that goes on by 1 ms each time it is read."""
    ticks = count()
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(SamplingParams=SimpleNamespace))
    monkeypatch.setattr("bench.vllm_loads.time", SimpleNamespace(perf_counter=lambda: next(ticks) / 1e3))
    engine = Engine()
    figures = run_load(engine, closed_loop(CALLERS, PROMPT, OUTPUT), vocab_size=100)
    assert engine.most == CALLERS
    assert [len(prompt) for prompt in engine.prompts] == [PROMPT] * 3 * CALLERS
    assert not engine.running
    return figures


def test_vllms_figures_have_the_keys_of_ours(theirs: dict[str, Any]) -> None:
    assert theirs["rates_per_s"]["output_tokens"] > 0
    assert theirs["latencies_s"]["itl"]["p50"] == pytest.approx(CALLERS / 1e3)


def test_steps_are_told_by_kind_and_by_whether_a_graph_ran_them() -> None:
    before = Counter({"tandem_step_seconds_count{mixed}": 2, "tandem_cuda_graph_steps_total{prompt,512}": 5})
    after = before + Counter(
        {
            "tandem_step_seconds_count{mixed}": 4,
            "tandem_step_seconds_sum{mixed}": 1,
            "tandem_cuda_graph_steps_total{prompt,512}": 3,
            "tandem_cuda_graphs{captured}": 40,
        }
    )
    assert steps_between(before, after) == {
        "mixed": {"steps": 4, "mean_ms": 250.0},
        "graphs": {"tandem_cuda_graphs{captured}": 40, "tandem_cuda_graph_steps_total{prompt,512}": 3},
    }
    assert steps_between(Counter(), Counter()) == {"graphs": {}}


def test_a_load_stands_beside_vllms_and_what_was_not_measured_has_no_place(theirs: dict[str, Any]) -> None:
    ours = {**theirs, "rates_per_s": {"output_tokens": 2 * theirs["rates_per_s"]["output_tokens"]}}
    served = {"model": "8b", "servers": {"1 worker": [ours], "1 prefill + 1 decode": []}}
    parts = [
        {"name": "served", "result": served},
        {"name": "vllm", "result": {"loads": [theirs]}},
        {"name": "transfer", "result": None},
    ]
    table = gpu_table({"parts": parts}, {"launch_gaps": []})
    head = f"8b: served {CALLERS} × ({PROMPT} + {OUTPUT}), 1 worker"
    (rate,) = [line for line in table.splitlines() if f"{head}, tokens/s" in line]
    assert rate.endswith("| 2.00 |")
    assert f"{head}: gap p99, ms" in table
    assert "mixed" not in table
    alone = gpu_table({"parts": parts[:1]}, {"launch_gaps": []})
    assert "vLLM" not in alone
