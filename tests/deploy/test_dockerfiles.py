"""The Dockerfiles, as far as they can be judged without building, which `test_images` does; and what builds them."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

from tests.deploy.dockerfile import Stage, ignored, parse
from tests.deploy.manifests import DEPLOY, ROOT, overlay
from tests.deploy.pods import COMMANDS, containers
from tests.scripts import load_script

FILES = {path.stem: parse(path.read_text()) for path in sorted((DEPLOY / "docker").glob("*.Dockerfile"))}
SHIPPED = {("router", "router"), ("worker", "cpu"), ("worker", "cuda")}
EVERY_IMAGE = pytest.mark.parametrize(("file", "target"), sorted(SHIPPED))
EVERY_FILE = pytest.mark.parametrize("file", sorted(FILES))
IGNORE = (ROOT / ".dockerignore").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
DEPENDENCIES = PROJECT["tool"]["tandem"]["dependencies"]


def complaints(stages: dict[str, Stage], target: str) -> list[str]:
    """What is wrong with an image."""
    stage = stages[target]
    user = stage.all("USER")
    installs = [run for each in stages.values() for run in each.all("RUN")]
    sources = [source for each in stages.values() for source in re.findall(r"--from=(\S+)", " ".join(each.all("COPY")))]
    pips = [
        command for run in installs for command in re.split(r"&&|;", run) if re.search(r"\bpip\b.* install\b", command)
    ]
    apts = [run for run in installs if "apt-get install" in run]
    holds = {
        "does not run as a number other than 0": bool(user)
        and re.fullmatch(r"[1-9]\d*:[1-9]\d*", user[-1]) is not None,
        "does not start tandem itself": stage.command("ENTRYPOINT") == ["tandem"],
        "is built on a rolling tag": all(re.search(r":[\w.-]*\d", each.image) for each in stages.values()),
        "is built on :latest": not any(each.image.endswith(":latest") for each in stages.values()),
        "copies from a stage that is not there": set(sources) <= stages.keys(),
        "downloads with ADD": not any(each.all("ADD") for each in stages.values()),
        "writes compiled modules at run time": "PYTHONDONTWRITEBYTECODE=1" in stage.last("ENV"),
        "has no home to write to": "HOME=/tmp" in stage.last("ENV"),
        "installs versions that are not pinned": all(" -c " in command for command in pips),
        "keeps pip's cache": all("--no-cache-dir" in command for command in pips),
        "keeps apt's lists": all(
            "--no-install-recommends" in run and "rm -rf /var/lib/apt/lists/*" in run and "apt-get update" in run
            for run in apts
        ),
        "has a secret or an index in it": not any(
            "ARG PIP_INDEX_URL=" in f"ARG {a}" for s in stages.values() for a in s.all("ARG")
        ),
    }
    return [complaint for complaint, kept in holds.items() if not kept]


@EVERY_IMAGE
def test_an_image_is_as_it_should_be(file: str, target: str) -> None:
    assert complaints(FILES[file], target) == []


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ("USER 65532:65532", "USER tandem", "does not run as a number other than 0"),
        ("USER 65532:65532", "USER 0:0", "does not run as a number other than 0"),
        ("python:3.12-slim-bookworm", "python:slim", "is built on a rolling tag"),
        ("--from=build ", "--from=builder ", "copies from a stage that is not there"),
        (" -c constraints.txt ./deploy", " ./deploy", "installs versions that are not pinned"),
        ('ENTRYPOINT ["tandem"]', 'ENTRYPOINT ["python"]', "does not start tandem itself"),
    ],
)
def test_an_image_that_is_not_is_noticed(old: str, new: str, complaint: str) -> None:
    text = (DEPLOY / "docker/router.Dockerfile").read_text()
    assert old in text
    assert complaint in complaints(parse(text.replace(old, new)), "router")


def test_the_images_and_targets_are_those_that_the_manifests_name() -> None:
    named = set()
    for name in ("cpu", "gpu-pools"):
        for each in containers(overlay(name)):
            image, _, tag = each.spec["image"].partition(":")
            file = image.removeprefix("tandem-")
            named.add((file, tag.partition("-")[2] or file))
    assert named == SHIPPED
    assert all(target in FILES[file] for file, target in named)


@EVERY_IMAGE
def test_ports_exposed_are_those_that_containers_listen_on(file: str, target: str) -> None:
    ports = {
        port
        for each in containers(overlay("cpu"))
        if each.spec["image"].startswith(f"tandem-{file}:")
        for port in each.ports.values()
    }
    assert {int(port) for port in FILES[file][target].last("EXPOSE").split()} == ports


def test_the_default_command_is_one_that_tandem_knows() -> None:
    for stages in FILES.values():
        for stage in stages.values():
            assert all(stage.command("CMD")[0] in COMMANDS for _ in stage.all("CMD"))


@EVERY_FILE
def test_what_is_copied_by_name_is_in_the_repository_and_in_the_context(file: str) -> None:
    for stage in FILES[file].values():
        for copy in stage.all("COPY"):
            if not copy.startswith("--from="):
                *sources, _ = copy.split()
                assert all((ROOT / source).exists() for source in sources)
                assert not any(ignored(IGNORE, source) for source in sources if source != ".")


@pytest.mark.parametrize(
    "path",
    [
        ".git/config",
        ".venv/bin/python",
        "tests/conftest.py",
        "secrets.txt",
        "tandem/__pycache__/x.pyc",
        "kernels/cpu/_native-avx2-0.so",
        "deploy/x",
    ],
)
def test_the_context_holds_nothing_else(path: str) -> None:
    assert ignored(IGNORE, path)


def test_the_router_s_image_installs_no_extra_and_so_no_torch() -> None:
    text = (DEPLOY / "docker/router.Dockerfile").read_text()
    assert not re.search(
        r"\[\w+\]'|torch\b|requirements.py \w+ >",
        "\n".join(line for line in text.splitlines() if not line.startswith("#")),
    )
    assert not any(re.match(r"torch|numpy|triton|flash", each) for each in DEPENDENCIES)


@pytest.mark.parametrize("stage", ["build-cpu", "build-cuda"])
def test_a_worker_s_image_has_the_kernels_of_every_processor(stage: str) -> None:
    runs = FILES["worker"][stage].all("RUN")
    compiled = runs.index("cd / && /opt/tandem/bin/python -m kernels.cpu.build --all")
    assert any("install" in run and run.endswith("./deploy/client .") for run in runs[:compiled])


@pytest.mark.parametrize("extras", [(), ("worker",), ("worker", "nixl"), ("nixl",)])
def test_dependencies_installed_before_the_source_are_all_that_it_asks_for(extras: tuple[str, ...]) -> None:
    command = [sys.executable, str(DEPLOY / "docker/requirements.py"), ",".join(extras)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT, timeout=20)
    optional = PROJECT["project"]["optional-dependencies"]
    every = {*extras, *(("worker", "native") if extras else ())}  # each stands on the ones before
    wanted = {*DEPENDENCIES, *(each for extra in every for each in optional[extra])}
    listed = done.stdout.splitlines()
    assert sorted(listed) == sorted(each for each in wanted if not each.startswith("tandem-serving"))


@pytest.fixture
def script() -> ModuleType:
    """What builds the images."""
    return load_script("deploy/docker/build.py")


def test_what_is_built_is_what_the_manifests_of_cpus_name(script: ModuleType) -> None:
    built = script.images()
    assert set(built) == {each.spec["image"] for each in containers(overlay("cpu"))}
    assert all(target in FILES[file] for file, target in built.values())


def test_pip_is_configured_in_a_build_as_it_is_outside(script: ModuleType, tmp_path: Path) -> None:
    certificates, index = tmp_path / "ca.crt", tmp_path / "packages/simple"
    certificates.touch()
    index.mkdir(parents=True)
    listed = f"""global.cert='/elsewhere'
global.extra-index-url='https://pypi.example.com/simple file://{index}'
install.no-deps='false'
:env:.cert='{certificates}'
"""
    settings = script.pip_settings(listed)
    assert settings == {
        "cert": str(certificates),
        "extra-index-url": f"https://pypi.example.com/simple file://{index}",
        "no-deps": "false",
    }
    # An index in a folder links to files beside it; what is not there is not mounted.
    assert script.local_paths(settings) == [certificates, index.parent]
    assert script.local_paths({"find-links": "/nowhere/at/all /"}) == []


WITHOUT_WORKERS = """
import importlib, pkgutil, sys

class Absent:
    names = {names!r}
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in self.names:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Absent())
for package in ("router", "tandem"):
    for module in pkgutil.walk_packages(importlib.import_module(package).__path__, package + "."):
        if module.name.rpartition(".")[2] != "__main__":
            importlib.import_module(module.name)
"""


def modules_of_extras() -> set[str]:
    """What is installed beside the base dependencies, as names of modules: what the router's image lacks."""
    project = PROJECT["project"]
    base = {name_of(each) for each in DEPENDENCIES}
    extras = {name_of(each) for extra in project["optional-dependencies"].values() for each in extra}
    return {name.replace("-", "_") for name in extras - base - {"tandem-serving", "types_grpcio", "setuptools"}}


def name_of(requirement: str) -> str:
    return re.match(r"[\w.-]+", requirement)[0].lower()  # type: ignore[index]


def test_every_module_of_the_router_s_image_imports_with_base_dependencies_alone() -> None:
    names = modules_of_extras() | {"yaml", "transformers"}
    assert {"torch", "numpy", "triton", "safetensors", "msgpack"} <= names
    program = WITHOUT_WORKERS.format(names=names)
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, cwd=ROOT, timeout=60
    )
    assert done.returncode == 0, done.stderr
