"""Native libraries are compiled where they are missing, once, and only those that were asked for."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from kernels.cpu import build
from kernels.cpu.tiers import TIERS, machine_tiers

pytestmark = pytest.mark.native


@pytest.fixture
def sources(monkeypatch, tmp_path):
    """Of some lines, which compile in no time."""
    folder = tmp_path / "src"
    folder.mkdir()
    for name in ("team.cpp", "decoder.cpp", "kernel.cpp"):
        (folder / name).write_text("namespace { [[maybe_unused]] int nothing; }\n")
    monkeypatch.setattr(build, "SOURCES", folder)
    return folder


@pytest.fixture
def folder(monkeypatch, sources, tmp_path):
    """Where the libraries lie."""
    monkeypatch.setattr(build, "FOLDER", tmp_path / "libraries")
    return tmp_path / "libraries"


@pytest.fixture
def compiled(monkeypatch):
    """Names of the objects that were compiled."""
    objects: list[str] = []
    run = build._run

    def recorded(command):
        objects.extend(path.rsplit("/", 1)[1] for path in command[-1:] if path.endswith(".o"))
        run(command)

    monkeypatch.setattr(build, "_run", recorded)
    return objects


def built(folder):
    return {path.name.split("-")[1] for path in folder.glob("_native-*.so")}


def test_what_all_tiers_use_and_the_best_tier_of_this_processor_are_built(folder):
    build.build_best()
    assert built(folder) == {build.COMMON, machine_tiers()[-1]}


def test_a_compiler_that_does_not_know_the_best_tier_builds_the_next(folder, monkeypatch):
    monkeypatch.setattr(build, "machine_tiers", lambda: ("baseline", "of tomorrow"))
    monkeypatch.setitem(TIERS, "of tomorrow", build.TIERS["baseline"].__class__(("-mtomorrow",)))
    build.build_best()
    assert built(folder) == {build.COMMON, "baseline"}


def test_a_tier_is_added_to_those_that_are_there(folder, compiled):
    build.build(["baseline"])
    compiled.clear()
    build.build(TIERS)
    assert built(folder) == {build.COMMON, *TIERS}
    assert set(compiled) == {f"kernel-{tier}.o" for tier in TIERS if tier != "baseline"}


def test_of_those_who_ask_at_once_one_compiles(folder, compiled):
    told = []
    with ThreadPoolExecutor(8) as executor:
        for asked in [executor.submit(build.build, ["baseline"], announce=told.append) for _ in range(8)]:
            asked.result()
    assert sorted(compiled) == ["decoder-common.o", "kernel-baseline.o", "team-common.o"]
    assert told == [("common", "baseline")]


def test_what_is_there_needs_no_compiler(folder, monkeypatch):
    build.build(["baseline"])
    monkeypatch.setenv("PATH", "")
    build.build(["baseline"])


def test_sources_that_change_while_they_are_compiled_give_no_library(folder, sources, monkeypatch):
    compile_one = build._run

    def edit(command):
        compile_one(command)
        (sources / "kernel.cpp").write_text("// edited meanwhile\n")

    monkeypatch.setattr(build, "_run", edit)
    with pytest.raises(build.BuildError, match="changed while they were compiled"):
        build.build(["baseline"])
    assert built(folder) == set()


def test_other_sources_are_another_library_and_the_old_one_goes(folder, sources):
    build.build(["baseline"])
    before = set(folder.glob("*.so"))
    (sources / "kernel.cpp").write_text("// none\n")
    assert not build.library_path("baseline").exists()
    build.build(["baseline"])
    assert built(folder) == {build.COMMON, "baseline"}
    assert not before & set(folder.glob("*.so"))


def test_what_the_compiler_refuses_is_told_and_leaves_no_library(folder, sources):
    (sources / "kernel.cpp").write_text("no C++\n")
    with pytest.raises(build.BuildError, match=r"kernel\.cpp"):
        build.build_best()
    assert built(folder) == set()


def test_a_folder_that_cannot_be_written_to_is_told(tmp_path, sources):
    (tmp_path / "file").touch()
    with pytest.raises(build.BuildError, match="file"):
        build.build(["baseline"], tmp_path / "file")
