"""Builds the router's and the CPU workers' images with podman as root, and says how long each took and how large it is.

    python deploy/docker/build.py                        # on the Dockerfiles' own base, which a registry must bring
    python deploy/docker/build.py --debian bookworm      # on a base made of Debian's packages: needs no registry
    python deploy/docker/build.py --root DIR             # images in a folder of their own

Steps run in a chroot (`--isolation=chroot`), which wants no container runtime and none of its privileges. pip is
configured inside as it is here: what `pip config list` says, and the local files that it names, are mounted while steps
run and are in no layer. Options behind `--` go to `podman build`.
"""

from __future__ import annotations

import argparse
import ast
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILES = "deploy/docker/{}.Dockerfile"
PACKAGES = ("ca-certificates", "python-is-python3", "python3", "python3-pip", "python3-venv")
"""What a base needs beside Debian's essential packages."""
_PIP_CONF = "/etc/pip.conf"
_VERSION = re.compile(r'__version__ = "(.+)"')


class Podman:
    """podman with its images in a folder, or where it keeps them by itself."""

    def __init__(self, root: Path | None) -> None:
        own = [] if root is None else ["--root", f"{root}/storage", "--runroot", f"{root}/run"]
        self._command = ("podman", *own)

    def __call__(self, *arguments: str) -> str:
        """Returns what it prints. Raises CalledProcessError."""
        return subprocess.run(
            [*self._command, *arguments], check=True, text=True, stdout=subprocess.PIPE
        ).stdout.strip()

    def show(self, *arguments: str) -> None:
        """Runs it in the sight of whoever waits. Raises CalledProcessError."""
        subprocess.run([*self._command, *arguments], check=True, stdout=sys.stderr, cwd=ROOT)

    def has(self, image: str) -> bool:
        """Whether it holds the image."""
        return subprocess.run([*self._command, "image", "exists", image], check=False).returncode == 0

    def megabytes(self, image: str) -> int:
        """Size of all layers, as they lie on the disk."""
        return round(int(self("image", "inspect", "--format", "{{.Size}}", image)) / 1e6)


def images() -> dict[str, tuple[str, str]]:
    """Image → its Dockerfile and target."""
    version = _VERSION.findall((ROOT / "tandem/__init__.py").read_text())[0]
    return {
        f"tandem-router:{version}": ("router", "router"),
        f"tandem-worker:{version}-cpu": ("worker", "cpu"),
    }


def debian_base(podman: Podman, suite: str) -> str:
    """Returns an image of Debian's packages alone, with Python and pip; makes it where it is missing."""
    image = f"localhost/tandem-base:{suite}"
    if not podman.has(image):
        with tempfile.TemporaryDirectory(prefix="tandem-base-") as folder:
            command = ["debootstrap", "--variant=minbase", f"--include={','.join(PACKAGES)}", suite, f"{folder}/root"]
            subprocess.run(command, check=True, stdout=sys.stderr)
            subprocess.run(["tar", "-C", f"{folder}/root", "-cf", f"{folder}/base.tar", "."], check=True)
            podman("import", f"{folder}/base.tar", image)
    return image


@contextmanager
def pip_volumes() -> Iterator[list[str]]:
    """Yields the `--volume` options that show pip's configuration here to the steps of a build."""
    listed = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], check=True, text=True, stdout=subprocess.PIPE
    ).stdout
    settings = pip_settings(listed)
    with tempfile.NamedTemporaryFile("w", prefix="tandem-pip-", suffix=".conf") as conf:
        lines = (f"{name} = {value}".replace("\n", "\n    ") for name, value in settings.items())
        conf.write("\n".join(("[global]", *lines, "")))
        conf.flush()
        mounted = {_PIP_CONF: conf.name, **{str(path): str(path) for path in local_paths(settings)}}
        yield [f"--volume={source}:{target}:ro" for target, source in mounted.items()] if settings else []


def pip_settings(listed: str) -> dict[str, str]:
    """Returns the settings that `pip config list` prints, by option; an environment variable wins over a file."""
    found: dict[str, dict[str, str]] = {}
    for line in listed.splitlines():
        name, _, value = line.partition("=")
        section, _, option = name.rpartition(".")
        found.setdefault(section, {})[option] = str(ast.literal_eval(value))
    return {**found.get("global", {}), **found.get("install", {}), **found.get(":env:", {})}


def local_paths(settings: dict[str, str]) -> list[Path]:
    """Files and folders of this machine that the settings name. An index lies beside the files that it links to."""
    words = [word for value in settings.values() for word in value.split()]
    paths = [Path(word).parent if is_url else Path(word) for word, is_url in map(_path, words) if word.startswith("/")]
    return sorted({path for path in paths if path.exists() and path != Path("/")})


def _path(word: str) -> tuple[str, bool]:
    path = word.removeprefix("file://")
    return path, path != word


def build(podman: Podman, base: str | None, more: Sequence[str]) -> None:
    """Builds every image."""
    chosen = [] if base is None else [f"--build-arg=BASE={base}"]
    with pip_volumes() as volumes:
        for image, (file, target) in images().items():
            began_s = time.monotonic()
            where = ["-f", DOCKERFILES.format(file), "--target", target, "-t", image]
            podman.show("build", "--isolation=chroot", *chosen, *volumes, *where, *more, ".")
            print(f"{image}: {time.monotonic() - began_s:.0f} s, {podman.megabytes(image)} MB", flush=True)


def main() -> int:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    bases = parser.add_mutually_exclusive_group()
    bases.add_argument("--base", help="image with Python >= 3.11, pip and venv; none: that of the Dockerfiles")
    bases.add_argument("--debian", metavar="SUITE", help="make the base of Debian's packages, such as bookworm")
    parser.add_argument("--root", type=Path, help="folder for images; none: where podman keeps them")
    parser.add_argument("more", nargs="*", help="options for `podman build`, behind --")
    given = parser.parse_args()
    podman = Podman(given.root)
    base = given.base
    if given.debian:
        began_s = time.monotonic()
        base = debian_base(podman, given.debian)
        print(f"{base}: {time.monotonic() - began_s:.0f} s, {podman.megabytes(base)} MB", flush=True)
    build(podman, base, given.more)
    return 0


if __name__ == "__main__":
    sys.exit(main())
