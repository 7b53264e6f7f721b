"""What pyproject.toml cannot say: the protos lie beside their stubs."""

from __future__ import annotations

from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

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
        for proto in sorted((Path(__file__).resolve().parents[2] / "protos" / PROTOS).glob("*.proto")):
            self.copy_file(str(proto), str(folder / proto.name))


setup(cmdclass={"build_py": BuildClient})
