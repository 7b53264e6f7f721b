"""What a processor can do decides which tiers run: each needs its own instructions and those of all before it."""

from __future__ import annotations

import pytest

from kernels.cpu import tiers

AVX2 = "avx2 fma f16c"
AVX512 = f"{AVX2} avx512f avx512bw avx512vl avx512dq"
BF16 = f"{AVX512} avx512_bf16 avx512_vnni"


@pytest.fixture
def runs(monkeypatch, tmp_path):
    """The tiers of an x86 processor with some features."""
    monkeypatch.setattr(tiers, "TIERS", tiers._X86)
    monkeypatch.setattr(tiers, "MACHINE", "x86_64")

    def runs(features: str, gives_tiles: bool = True) -> tuple[str, ...]:
        cpuinfo = tmp_path / "cpuinfo"
        cpuinfo.write_text(f"processor\t: 0\nflags\t\t: fpu {features}\n\nprocessor\t: 1\nflags\t\t: fpu\n")
        found = tiers._x86_features(cpuinfo)
        monkeypatch.setattr(tiers, "_x86_features", lambda _: found)
        monkeypatch.setattr(tiers, "_may_use_amx", lambda: gives_tiles)
        return tiers.machine_tiers.__wrapped__()

    return runs


@pytest.mark.parametrize(
    ("features", "highest"),
    [
        ("sse2", "baseline"),
        ("avx2 fma", "baseline"),
        (AVX2, "avx2"),
        ("avx512f avx512bw avx512vl avx512dq", "baseline"),
        (AVX512, "avx512"),
        (f"{AVX512} avx512_bf16", "avx512"),
        (f"{AVX512} amx_tile amx_bf16", "avx512"),
        (BF16, "avx512_bf16"),
        (f"{BF16} amx_tile amx_bf16", "amx"),
    ],
)
def test_the_highest_tier_is_the_last_whose_instructions_are_all_there(runs, features, highest):
    names = list(tiers._X86)
    assert runs(features) == tuple(names[: names.index(highest) + 1])


def test_there_is_no_amx_where_the_system_gives_no_tiles(runs):
    assert runs(f"{BF16} amx_tile amx_bf16", gives_tiles=False)[-1] == "avx512_bf16"


def test_a_system_that_lists_no_features_runs_the_baseline(tmp_path):
    assert tiers._x86_features(tmp_path / "nothing") == set()
