"""The two distributions, built as people build them and installed into environments of their own.

tandem-serving-client: stubs and client, with grpcio and protobuf alone. tandem-serving: the rest of the repository.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
import venv
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from email.message import Message
from email.parser import Parser
from importlib.metadata import distribution
from pathlib import Path

import pytest

import tandem
from bench.support.cluster import Cluster
from kernels.cpu.tiers import machine_tiers
from tandem.client import Client

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 100.0
NEEDED_BY_CLIENTS = ("grpcio", "protobuf", "typing_extensions")
"""The last one is grpcio's own."""


@dataclass(frozen=True, slots=True)
class Wheel:
    """What one wheel holds."""

    path: Path

    @property
    def files(self) -> set[str]:
        with zipfile.ZipFile(self.path) as archive:
            return {name for name in archive.namelist() if ".dist-info/" not in name}

    @property
    def metadata(self) -> Message:
        with zipfile.ZipFile(self.path) as archive:
            (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
            return Parser().parsestr(archive.read(name).decode())

    @property
    def licences(self) -> list[str]:
        with zipfile.ZipFile(self.path) as archive:
            return [archive.read(name).decode() for name in archive.namelist() if "/licenses/" in name]


class Environment:
    """A fresh virtual environment, without what the tests' own has."""

    def __init__(self, folder: Path) -> None:
        venv.create(folder, with_pip=False, symlinks=True)
        self.bin = folder / "bin"
        self.folder = folder
        self.variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

    @property
    def packages(self) -> Path:
        """Its site-packages."""
        return next((self.folder / "lib").glob("python3.*")) / "site-packages"

    def install(self, wheel: Wheel) -> None:
        """As pip does, without its dependencies."""
        pip(f"--python={self.bin / 'python'}", "install", "--no-deps", "--no-index", str(wheel.path))

    def install_copy(self, name: str) -> None:
        """A distribution of the tests' own environment: no network is needed, nor any trust in what is there."""
        for file in distribution(name).files or ():
            target = self.packages / file
            if ".." not in file.parts and target.suffix != ".pyc":
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(file.locate(), target)

    def run(self, *command: str) -> str:
        """What one of its programs prints."""
        done = subprocess.run(
            [str(self.bin / command[0]), *command[1:]],
            cwd=self.folder,
            env=self.variables,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    @contextmanager
    def serving(self) -> Iterator[str]:
        """Its server on the demo model, by address; what it logs lies in `log`."""
        command = [str(self.bin / "tandem"), "serve", "--model", "demo", "--listen", "127.0.0.1:0"]
        with (
            (self.folder / "log").open("w") as log,
            subprocess.Popen(
                command, cwd=self.folder, env=self.variables, stdout=subprocess.PIPE, stderr=log, text=True
            ) as serving,
        ):
            try:
                assert serving.stdout is not None
                word, target = serving.stdout.readline().split()
                assert word == "ready"
                yield target
                serving.terminate()
                assert serving.wait(TIMEOUT_S) == 0
            finally:
                serving.kill()


def pip(*arguments: str, timeout_s: float = TIMEOUT_S, **variables: str) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments]
    done = subprocess.run(
        command, env={**os.environ, **variables}, capture_output=True, text=True, timeout=timeout_s, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what is, or would be, in git: nothing built before gets into a wheel."""
    folder = tmp_path_factory.mktemp("checkout")
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split("\n")
    for name in filter(None, listed):
        if (ROOT / name).exists():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name, follow_symlinks=False)
    return folder


def build(checkout: Path, project: str) -> Wheel:
    """Without a compiler in PATH: the native kernels take minutes, and are optional."""
    out = checkout.parent / f"wheel-of-{project.replace('/', '-')}"
    flags = ("--quiet", "--no-deps", "--no-index", "--no-build-isolation", f"--wheel-dir={out}")
    pip("wheel", *flags, str(checkout / project), PATH=str(checkout), PYTHONPATH="")
    (path,) = out.glob("*.whl")
    return Wheel(path)


@pytest.fixture(scope="module")
def client_wheel(checkout: Path) -> Wheel:
    return build(checkout, "deploy/client")


@pytest.fixture(scope="module")
def server_wheel(checkout: Path) -> Wheel:
    return build(checkout, ".")


@pytest.fixture(scope="module")
def client_environment(client_wheel: Wheel, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    environment = Environment(tmp_path_factory.mktemp("client"))
    for name in NEEDED_BY_CLIENTS:
        environment.install_copy(name)
    environment.install(client_wheel)
    return environment


@pytest.fixture(scope="module")
def server_environment(
    client_wheel: Wheel, server_wheel: Wheel, tmp_path_factory: pytest.TempPathFactory
) -> Environment:
    """Both wheels; the libraries are those of the tests' environment, which takes gigabytes."""
    environment = Environment(tmp_path_factory.mktemp("server"))
    (environment.packages / "libraries.pth").write_text(f"{Path(pytest.__file__).parents[1]}\n")
    environment.install(client_wheel)
    environment.install(server_wheel)
    return environment


@pytest.mark.timeout(400)  # two wheels are built
def test_no_file_is_in_both_and_every_module_is_in_one(
    client_wheel: Wheel, server_wheel: Wheel, checkout: Path
) -> None:
    assert client_wheel.files & server_wheel.files == set()
    installed = client_wheel.files | server_wheel.files
    folders = {name.split("/")[0] for name in installed if name.endswith(".py")}
    assert folders == {*(path.parent.name for path in checkout.glob("*/__init__.py"))} - {"tests", "bench"}
    modules = {path.relative_to(checkout).as_posix() for name in folders for path in (checkout / name).rglob("*.py")}
    assert {name for name in installed if name.endswith(".py")} == modules


def test_versions_dependencies_and_licence_are_told(client_wheel: Wheel, server_wheel: Wheel) -> None:
    client, server = client_wheel.metadata, server_wheel.metadata
    assert (client["Name"], server["Name"]) == ("tandem-serving-client", "tandem-serving")
    assert client["Version"] == server["Version"] == tandem.__version__
    assert [re.split(r"\W", each)[0] for each in client.get_all("Requires-Dist", [])] == ["grpcio", "protobuf"]
    assert server.get_all("Requires-Dist", [])[0] == f"tandem-serving-client=={tandem.__version__}"
    for wheel in (client_wheel, server_wheel):
        assert wheel.metadata["License-Expression"] == "Apache-2.0"
        assert "Typing :: Typed" in wheel.metadata.get_all("Classifier", [])
        assert wheel.licences == [(ROOT / "LICENSE").read_text()]


IMPORT_ALL = """
import importlib, pkgutil, sys
import tandem
for module in pkgutil.walk_packages(tandem.__path__, "tandem."):
    importlib.import_module(module.name)
print(*(name for name in sys.modules if name.startswith("tandem")))
"""


def test_every_module_of_the_client_is_imported_with_nothing_further_installed(
    client_environment: Environment, client_wheel: Wheel
) -> None:
    pip(f"--python={client_environment.bin / 'python'}", "check")
    imported = set(client_environment.run("python", "-c", IMPORT_ALL).split())
    held = {
        re.sub(r"(/__init__)?\.py$", "", name).replace("/", ".") for name in client_wheel.files if name.endswith(".py")
    }
    assert imported == held


CALL = """
import sys, time
from tandem.client import Client
from tandem.errors import InvalidRequest
with Client(sys.argv[1]) as client:
    client.wait_ready(timeout_s=60)
    print(client.serving())
    print(len(client.complete("Once upon a time", max_tokens=4, ignore_eos=True).choices[0].token_ids))
    print(sum(len(update.token_ids) for update in client.generate("Once", max_tokens=3, ignore_eos=True)))
    try:
        client.complete("Once", temperature=-1.0)
    except InvalidRequest as error:
        print(error.field)
    until_s = time.monotonic() + 60
    while len(client.status().workers) < 2 and time.monotonic() < until_s:
        time.sleep(0.1)  # it is ready with the first of its elastic workers
    print(len(client.status().workers))
"""


@pytest.mark.timeout(400)
def test_an_installed_client_calls_an_installed_server(
    client_environment: Environment, server_environment: Environment
) -> None:
    assert server_environment.run("tandem", "--version") == f"tandem {tandem.__version__}\n"
    where = server_environment.run(
        "python", "-c", "import cli, tandem.client; print(cli.__file__, tandem.client.__file__)"
    )
    assert all(Path(path).is_relative_to(server_environment.folder) for path in where.split())

    with server_environment.serving() as target:
        told = client_environment.run("python", "-c", CALL, target)
    assert told.split() == ["True", "4", "3", "sampling.temperature", "2"]


DIST = ROOT / "dist"
"""What `make wheels` builds."""
BUILT_TIERS = {
    "aarch64": {"common", "baseline", "neon_bf16"},
    "x86_64": {"common", "baseline", "avx2", "avx512", "avx512_bf16", "amx"},
}


@pytest.mark.wheels
@pytest.mark.parametrize("machine", BUILT_TIERS)
def test_a_built_wheel_holds_the_kernels_of_every_tier_for_every_python_and_old_systems(machine: str) -> None:
    (wheel,) = (Wheel(path) for path in DIST.glob(f"*_{machine}.whl"))
    assert set(re.findall(r"/_native-(\w+)-\w+\.so", "\n".join(wheel.files))) == BUILT_TIERS[machine]
    _, version, *python, platforms = wheel.path.stem.split("-")
    assert (version, python) == (tandem.__version__, ["py3", "none"])
    assert f"manylinux_2_17_{machine}" in platforms.split(".")


@pytest.mark.wheels
@pytest.mark.timeout(900)  # torch and all else is installed from the network
def test_built_wheels_serve_by_their_own_kernels_where_there_is_no_compiler(
    tmp_path: Path, demo_cluster: Cluster
) -> None:
    environment = Environment(tmp_path / "bare")
    environment.variables["PATH"] = str(environment.bin)
    wheels = [*DIST.glob("*-none-any.whl"), *DIST.glob(f"*_{platform.machine()}.whl")]
    native = [f"{wheel}[native]" if "client" not in wheel.name else str(wheel) for wheel in wheels]
    constraints = ("--constraint", str(ROOT / "constraints.txt"))
    flags = ("--quiet", "--no-compile", "--only-binary=:all:", *constraints)
    pip(f"--python={environment.bin / 'python'}", "install", *flags, *native, timeout_s=800, **environment.variables)
    kernels = set((environment.packages / "kernels/cpu").glob("_native*"))

    with environment.serving() as target:
        asked = [Client(each) for each in (target, demo_cluster.target)]
        answers = [each.complete("Once upon a time", max_tokens=40, temperature=0.0).choices[0] for each in asked]
        for each in asked:
            each.close()
    assert answers[0].token_ids == answers[1].token_ids
    assert f"cpu-{machine_tiers()[-1]}" in (environment.folder / "log").read_text()
    assert set((environment.packages / "kernels/cpu").glob("_native*")) == kernels
