"""The loads of `make gpu`, tiny, on the CPU: every figure that a GPU is to give is there."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from bench import served
from bench.gpu import Part, run_part
from bench.gpu_pages import gpu_table


def test_served_loads_and_a_mixed_step_give_their_figures(capfd: pytest.CaptureFixture[str]) -> None:
    assert served.main(["--shape", "smoke", "--device", "cpu", "--no-prefix-cache"]) == 0
    found = json.loads(capfd.readouterr().out)
    assert list(found["servers"]) == ["1 worker", "1 prefill + 1 decode"]
    for (figures,) in found["servers"].values():
        assert figures["rates_per_s"]["output_tokens"] > 0
        assert sum(each["steps"] for kind, each in figures["steps"].items() if kind != "graphs") > 0
    assert found["mixed_step"]["launch_s"] > 0
    assert found["mixed_step"]["idle_share"] is None
    table = gpu_table({"parts": [{"name": "served", "result": found}]}, {"launch_gaps": []})
    assert "smoke: served 4 × (64 + 16), 1 worker: gap p50, ms" in table


VLLM = """
from types import SimpleNamespace as SamplingParams, SimpleNamespace as EngineArgs
__version__ = "0"

class LLMEngine:
    def __init__(self, args):
        print("a line of the log")
        self.left = {}

    from_engine_args = classmethod(lambda cls, args: cls(args))

    def add_request(self, name, prompt, sampling):
        text = SamplingParams(token_ids=[0] * sampling.max_tokens)
        self.left[name] = SamplingParams(request_id=name, outputs=[text], finished=True)

    def step(self):
        ended, self.left = list(self.left.values()), {}
        return ended
"""


def test_vllms_log_does_not_spoil_its_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "vllm.py").write_text(VLLM)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{Path(served.__file__).parents[1]}")
    command = (sys.executable, "-m", "bench.vllm_loads", "--shape", "smoke")
    outcome = run_part(Part("vllm", command, 120.0, gives_json=True))
    assert outcome.succeeded, outcome.last_words
    assert (outcome.result["vllm"], len(outcome.result["loads"])) == ("0", 1)
