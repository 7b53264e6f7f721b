"""Which modules of `tandem/` the distribution tandem-serving-client holds; tandem-serving holds the rest.

What is listed is what `tandem.client` and `tandem.v1` import, and imports grpcio and protobuf alone:
`tests/e2e/test_packaging.py` compares.
"""

from __future__ import annotations

from pathlib import Path

from setuptools.command.build_py import build_py

PROTOS = "tandem/v1"
"""Where they lie, as they import each other."""
PACKAGES = frozenset({"tandem.client", "tandem.security", "tandem.v1"})
"""As a whole."""
MODULES = frozenset(
    {
        *("tandem.__init__", "tandem.cluster_status", "shell.config", "tandem.convert"),
        *("tandem.errors", "tandem.limits", "tandem.option_values", "tandem.options", "tandem.types"),
        *("tandem.str_enum", "tandem.token_ids", "shell.worker_config"),
        *("tandem.rpc.__init__", "tandem.rpc.channel", "tandem.rpc.google_messages", "tandem.rpc.received_error"),
        *("tandem.rpc.tls", "shell.telemetry.__init__", "tandem.logger"),
    }
)


def is_for_clients(package: str, module: str) -> bool:
    """Whether tandem-serving-client holds `package.module`; a package's own file is its module `__init__`."""
    return package in PACKAGES or f"{package}.{module}" in MODULES


class BuildClient(build_py):
    """Builds the modules for clients, and puts the protos beside their stubs."""

    def run(self) -> None:
        """All of it; installed as editable, modules and protos stay where they lie."""
        super().run()
        if self.editable_mode:
            return
        folder = Path(self.build_lib) / PROTOS
        for proto in sorted((Path(__file__).resolve().parents[2] / "protos" / PROTOS).glob("*.proto")):
            self.copy_file(str(proto), str(folder / proto.name))

    def find_package_modules(self, package: str, package_dir: str) -> list[tuple[str, str, str]]:
        """Triples of package, module and file."""
        found = super().find_package_modules(package, package_dir)
        return [each for each in found if is_for_clients(*each[:2])]


class BuildServer(build_py):
    """Builds the modules that clients do without."""

    def find_package_modules(self, package: str, package_dir: str) -> list[tuple[str, str, str]]:
        """Triples of package, module and file."""
        found = super().find_package_modules(package, package_dir)
        return [each for each in found if not is_for_clients(*each[:2])]
