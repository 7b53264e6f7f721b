"""What pyproject.toml cannot say: only some modules of `tandem/` are for clients."""

from __future__ import annotations

import sys
from pathlib import Path

from setuptools import setup

sys.path.insert(0, str(Path(__file__).parent))

from contents import BuildClient

setup(cmdclass={"build_py": BuildClient})
