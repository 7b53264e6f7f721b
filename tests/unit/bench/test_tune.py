"""The tuner without a GPU: what it tries, what it drops, what it would write."""

import importlib.util

import pytest
import torch

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)

from bench import tune
from kernels.triton.compile_check import Build
from kernels.triton.configs import KernelConfig, ShapeClass, attention_config, shipped_configs

TILE = KernelConfig(64, 16, 4, 2)


@pytest.mark.parametrize("arch", [80, 86, 90])
def test_a_table_is_written_as_it_was_read(arch):
    table = {kernel: shipped_configs(kernel, arch) for kernel in ("prefill", "decode")}
    assert tune.render(table) == (tune.CONFIGS / f"sm{arch}.json").read_text()


@pytest.mark.parametrize("kernel", ["prefill", "decode"])
def test_a_row_is_tried_with_every_variant_that_it_decides(kernel):
    variants = tune.variants_of_row(kernel, ShapeClass(128, 2), TILE, 90)
    assert {variant.constexprs["HEAD_DIM"] for variant in variants} == {80, 96, 128}
    assert {variant.signature["q"] for variant in variants} == {"*bf16", "*fp16"}
    assert {(variant.constexprs["BLOCK_M"], variant.num_warps) for variant in variants} == {(64, 4)}
    after = tune._MODULES[kernel].attention_config
    assert after is attention_config


def test_a_candidate_is_built_plain_first_and_dropped_if_faulty(monkeypatch):
    def build_all(variants, jobs):
        assert not any(each.constexprs["WINDOWED"] for _, each in variants)
        return [
            Build("", arch, spilled_bytes=800 * (each.constexprs["BLOCK_N"] == 128), code=str(number))
            for number, (arch, each) in enumerate(variants)
        ]

    monkeypatch.setattr(tune, "build_all", build_all)
    sound = tune.sound_candidates("decode", ShapeClass(64, 2), 90, jobs=1)
    assert sound == [config for config in tune.candidates("decode") if config.block_n != 128]


def test_one_faulty_variant_makes_a_candidate_unsound(monkeypatch):
    def build_all(variants, jobs):
        return [Build("", arch, spilled_bytes=800 * each.constexprs["WINDOWED"]) for arch, each in variants]

    monkeypatch.setattr(tune, "build_all", build_all)
    assert not tune.is_sound("prefill", ShapeClass(64, 2), TILE, 90, jobs=1)
    assert tune.is_sound("prefill", ShapeClass(64, 4), TILE, 90, jobs=1)


@pytest.mark.parametrize(("gain", "changes"), [(1.5, True), (1.01, False)])
def test_a_row_changes_only_for_a_gain(gain, changes, monkeypatch):
    row = ShapeClass(64, 2)
    own = shipped_configs("decode", 80)[row]
    monkeypatch.setattr(tune, "AttentionBatch", lambda *_: None)
    monkeypatch.setattr(tune, "sound_candidates", lambda *_: [TILE, own])
    monkeypatch.setattr(tune, "score_s", lambda kernel, config, batches: 1.0 if config == TILE else gain)
    monkeypatch.setattr(tune, "is_sound", lambda *_: True)
    assert tune.tuned("decode", row, torch.device("cpu"), jobs=1) == (TILE if changes else own)
