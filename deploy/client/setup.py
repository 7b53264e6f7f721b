"""What pyproject.toml cannot say: where `tandem/` lies, and the protos that lie beside their stubs.

In a checkout both are the repository's; a source distribution holds copies.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py
from setuptools.command.sdist import sdist

HERE = Path(__file__).resolve().parent
ROOT = HERE if (HERE / "tandem").is_dir() else HERE.parents[1]
PROTOS = "tandem/v1"
"""The protos' folder, as they import each other."""


class BuildClient(build_py):
    """Builds `tandem/`, and puts the protos beside their stubs."""

    def run(self) -> None:
        """Copies modules and protos; of an editable install both stay where they lie."""
        super().run()
        if self.editable_mode:
            return
        folder = Path(self.build_lib) / PROTOS
        for proto in sorted((ROOT / "protos" / PROTOS).glob("*.proto")):
            self.copy_file(str(proto), str(folder / proto.name))


class SourceClient(sdist):
    """Packs what the wheel is made of."""

    def make_release_tree(self, base_dir: str, files: Sequence[str]) -> None:
        """Copies this folder's files, then the repository's."""
        super().make_release_tree(base_dir, [name for name in files if not name.startswith("..")])
        for folder in ("tandem", f"protos/{PROTOS}"):
            shutil.copytree(ROOT / folder, Path(base_dir, folder), ignore=shutil.ignore_patterns("__pycache__"))


setup(
    package_dir={"tandem": os.path.relpath(ROOT / "tandem", HERE)},
    cmdclass={"build_py": BuildClient, "sdist": SourceClient},
)
