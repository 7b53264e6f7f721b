"""Fails on what must not be in a service that reads files and bytes from others.

Banned: pickle and its kin, torch.load, eval, exec, trust_remote_code=True, NotImplementedError
(a documented option does what it says or is refused by name), and os.environ outside
tandem/config.py.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

from sources import ROOT, python_files

BANNED_MODULES = frozenset({"pickle", "cloudpickle", "dill", "marshal", "shelve"})
BANNED_CALLS = frozenset({"eval", "exec", "torch.load"})
ENVIRONMENT = frozenset({"os.environ", "os.getenv", "os.putenv"})
MAY_READ_ENVIRONMENT = ("tandem/config.py", "tests/", "bench/", ".ci/")


def findings(tree: ast.Module, name: str) -> Iterator[tuple[int, str]]:
    """Line and complaint for each banned thing in one file."""
    for node in ast.walk(tree):
        for complaint in (banned_import(node), banned_use(node), banned_environment(node, name)):
            if complaint is not None:
                yield getattr(node, "lineno", 1), complaint


def banned_import(node: ast.AST) -> str | None:
    """Modules that run what they read."""
    if isinstance(node, ast.Import):
        modules = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
        modules = [node.module or ""]
    else:
        return None
    return next((f"imports {module}" for module in modules if module.split(".")[0] in BANNED_MODULES), None)


def banned_use(node: ast.AST) -> str | None:
    """Calls and names."""
    match node:
        case ast.Call(func=func) if dotted(func) in BANNED_CALLS:
            return f"calls {dotted(func)}"
        case ast.keyword(arg="trust_remote_code", value=ast.Constant(value=True)):
            return "sets trust_remote_code=True"
        case ast.Name(id="NotImplementedError"):
            return "uses NotImplementedError"
    return None


def banned_environment(node: ast.AST, name: str) -> str | None:
    """The environment is read in one file."""
    if name.startswith(MAY_READ_ENVIRONMENT):
        return None
    if isinstance(node, ast.ImportFrom) and node.module == "os":
        used = {f"os.{alias.name}" for alias in node.names}
    else:
        used = {dotted(node)} if isinstance(node, ast.Attribute) else set()
    return next((f"uses {each}; only tandem/config.py may" for each in sorted(used & ENVIRONMENT)), None)


def dotted(node: ast.expr) -> str:
    """`a.b.c` of a chain of attributes; empty for anything else."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        owner = dotted(node.value)
        return f"{owner}.{node.attr}" if owner else ""
    return ""


def check(path: Path) -> list[str]:
    """Complaints about one file."""
    name = path.relative_to(ROOT).as_posix()
    tree = ast.parse(path.read_text(encoding="utf-8"), name)
    return [f"{name}:{line}: {complaint}" for line, complaint in findings(tree, name)]


def main() -> int:
    """Exit code 1 if anything is banned."""
    complaints = [complaint for path in python_files() for complaint in check(path)]
    print(*complaints, sep="\n", end="\n" if complaints else "", file=sys.stderr)
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main())
