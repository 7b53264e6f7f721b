"""The loads of `make gpu`, tiny, on the CPU: every figure that a GPU is to give is there."""

from __future__ import annotations

import json

import pytest

from bench import served
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
