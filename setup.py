"""What pyproject.toml cannot say of the distribution tandem-serving.

The native CPU kernels are compiled at install, where there is a compiler. `tandem/` is tandem-serving-client's,
which must be of the same version.
"""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

sys.path.insert(0, str(Path(__file__).parent))

import tandem
from kernels.cpu import build

PROJECT = tomllib.loads((Path(__file__).parent / "pyproject.toml").read_text())


class BuildNative(build_ext):
    """Compiles `kernels/cpu/src` for this processor. Without a compiler the package installs too, and runs on torch.

    Tiers that were built in place before go into a wheel as they are.
    """

    def run(self) -> None:
        """Says once what stands in the way, if anything does."""
        try:
            build.build_best(None if self.inplace else Path(self.build_lib, "kernels/cpu"))
        except build.BuildError as error:
            self.warn(f"the native CPU kernels are left out, which costs speed: {error}")


class PlatformWheel(bdist_wheel):
    """Tags a wheel for its platform and for every Python: ctypes opens the kernels, which know no ABI of Python's."""

    def get_tag(self) -> tuple[str, str, str]:
        """Returns Python, ABI and platform."""
        return "py3", "none", super().get_tag()[2]


# Not a module: what makes the wheel one of this platform.
setup(
    install_requires=[f"tandem-serving-client=={tandem.__version__}", *PROJECT["tool"]["tandem"]["dependencies"]],
    ext_modules=[Extension("kernels.cpu._native", sources=[], optional=True)],
    cmdclass={"bdist_wheel": PlatformWheel, "build_ext": BuildNative},
)
