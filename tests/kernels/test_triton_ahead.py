"""Kernels that are compiled where there is no GPU are those that a worker on one would look for."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bench.support.tiny_models import TINY_MODELS, save_tiny_model
from cli.main import main
from tests.kernels.devices import needs_gpu

pytest.importorskip("triton")

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
SERVED_ELSEWHERE = """
import sys
from collections import Counter
from pathlib import Path
import torch
from triton import knobs
from engine.warm_up import StepSizes, warm_up
from kernels import triton
from kernels.quantized import QuantForm
from kernels.triton.absent_gpu import compile_instead, pretend
from models.loading import load_model

folder, cache, device = Path(sys.argv[1]), Path(sys.argv[2]), torch.device(sys.argv[3])
form = QuantForm(sys.argv[4]) if len(sys.argv) > 4 else None
model = load_model(folder, "bfloat16", device, triton.load(), form)
if device.type == "cpu":
    found = compile_instead(cache)
    pretend(90)
else:
    found, knobs.cache.dir = Counter(), str(cache)
    knobs.compilation.listener = lambda *, src, cache_hit, **_: found.update([(src.name, cache_hit)])
warm_up(model, triton.load(), model.kv_layout(16), StepSizes(chunk_tokens=2048, max_seqs=20, context_tokens=3000))
print(sorted(name for name, is_found in found if not is_found), len(found))
"""


def ran(*arguments: object, **variables: str) -> str:
    command, environment = [sys.executable, *map(str, arguments)], {**ENVIRONMENT, **variables}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=110)
    assert done.returncode == 0, done.stderr
    return done.stdout


def compiling(model: Path, cache: object, arch: str, *form: str) -> tuple[object, ...]:
    options = ("--dtype", "bfloat16", *(("--quantize", *form) if form else ()))
    return ("-m", "cli.main", "compile", "--model", model, *options, "--cache", cache, "--arch", arch)


@pytest.mark.parametrize("form", [(), ("int4",)], ids=["plain", "int4"])
def test_what_was_compiled_ahead_is_found_by_steps_of_other_sizes(form: tuple[str, ...], tmp_path: Path) -> None:
    (tiny,) = (each for each in TINY_MODELS if each.name == "llama")
    model, cache = save_tiny_model(tiny, tmp_path / "model"), tmp_path / "cache"
    command = compiling(model, os.path.relpath(cache, ROOT), "90", *form)
    compiled = ran(*command).split()
    assert compiled[:1] == ["sm_90:"]
    assert int(compiled[1]) >= 10
    assert list(cache.rglob("decode_kernel*.cubin"))
    if not form:
        assert ran(*command).split()[1] == "0"
    missing, num_kernels = ran("-c", SERVED_ELSEWHERE, model, cache, "cpu", *form).rsplit(" ", 1)
    assert missing == "[]"
    assert int(num_kernels) >= 10


@needs_gpu
@pytest.mark.parametrize("form", [(), ("int4",)], ids=["plain", "int4"])
def test_a_gpu_finds_what_was_compiled_where_none_was_seen(form: tuple[str, ...], tmp_path: Path) -> None:
    (tiny,) = (each for each in TINY_MODELS if each.name == "llama")
    model, cache = save_tiny_model(tiny, tmp_path / "model"), tmp_path / "cache"
    major, minor = torch.cuda.get_device_capability()
    ran(*compiling(model, cache, f"{major}{minor}", *form), CUDA_VISIBLE_DEVICES="")
    missing, num_kernels = ran("-c", SERVED_ELSEWHERE, model, cache, "cuda:0", *form).rsplit(" ", 1)
    assert missing == "[]"
    assert int(num_kernels) >= 10


def test_interpreted_kernels_are_not_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tiny,) = (each for each in TINY_MODELS if each.name == "llama")
    model = save_tiny_model(tiny, tmp_path / "model")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert main(["compile", "--model", str(model), "--cache", str(tmp_path), "--arch", "90"]) == 2
    assert "TRITON_INTERPRET" in capsys.readouterr().err
