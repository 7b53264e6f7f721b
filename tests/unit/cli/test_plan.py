"""`tandem plan` on a small trace."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cli.main import main
from simulator.costs import CostModel, StepCosts
from simulator.shipped import model_of_this_machine, shipped_models


@pytest.fixture
def argv(tmp_path: Path) -> list[str]:
    trace, costs = tmp_path / "trace.jsonl", tmp_path / "costs.json"
    lines = [
        {"timestamp": 250 * number, "input_length": 300, "output_length": 8, "hash_ids": [number]}
        for number in range(12)
    ]
    trace.write_text("\n".join(map(json.dumps, lines)))
    CostModel(StepCosts(0.02, per_prompt_token=1e-3), source="a test").write(costs)
    return ["plan", "--trace", str(trace), "--cost-model", str(costs), "--itl", "0.2"]


def test_a_plan_names_the_workers_of_each_role(
    argv: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main([*argv, "--ttft", "1", "--json", "--autoscaler", str(tmp_path / "thresholds")]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["requests"] == 12
    assert plan["rate_per_s"] == pytest.approx(4.0)
    static, auto = plan["fleets"]["static"], plan["fleets"]["auto"]
    assert static["prefill"] >= 2  # 0.3 s for each prompt, four each second
    assert static["decode"] >= 1
    assert auto["elastic"] >= 2
    for found in (static, auto):
        assert found["attainment"] >= 0.9
    shown = {role: each.keys() for found in (static, auto) for role, each in found["thresholds"].items()}
    assert shown == {
        "prefill": {"tandem_prefill_queued_prompt_tokens"},
        "decode": {"tandem_kv_pool_usage_ratio"},
        "elastic": {"tandem_kv_pool_usage_ratio", "tandem_decode_queued_prompt_tokens"},
    }
    written = (tmp_path / "thresholds/kustomization.yaml").read_text()
    assert all(f"name: tandem-{role}}}" in written for role in shown)


def test_a_plan_reads_as_text(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*argv, "--ttft", "1", "--rate", "1"]) == 0
    trace, model, static, auto = capsys.readouterr().out.splitlines()
    assert trace.endswith("trace.jsonl, 12 requests at 1.00/s; first tokens within 1 s, then 0.2 s")
    assert model.endswith("costs.json (a test)")
    assert static.startswith("static  1 prefill")
    assert auto.startswith("auto    1 elastic")


def test_without_files_a_plan_says_which_cost_model_and_trace_it_took(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--json", "--rate", "0.5"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["trace"] == "the sample"
    assert plan["cost_model"] == model_of_this_machine()
    assert plan["fleets"]["auto"]["attainment"] >= 0.9


@pytest.mark.parametrize("name", shipped_models())
def test_a_shipped_cost_model_is_taken_by_name(name: str, capsys: pytest.CaptureFixture[str], argv: list[str]) -> None:
    argv[argv.index("--cost-model") + 1] = name
    assert main([*argv, "--rate", "0.01", "--ttft", "9"]) == 0
    assert f"cost model: {name} (" in capsys.readouterr().out


def test_a_folder_that_cannot_be_written_to_is_named(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    trace = argv[argv.index("--trace") + 1]
    assert main([*argv, "--ttft", "1", "--rate", "1", "--autoscaler", trace]) == 2
    assert f"--autoscaler: {trace}/kustomization.yaml" in capsys.readouterr().err


def test_objectives_out_of_reach_are_said_to_be(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*argv, "--ttft", "0.01", "--max-workers", "3"]) == 1
    assert "even 3 workers" in capsys.readouterr().err
