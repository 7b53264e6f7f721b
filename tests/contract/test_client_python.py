"""tandem-serving-client runs on an older Python than the server: what it imports is looked at, without running it."""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.scripts import ROOT


def client_files() -> list[Path]:
    """Modules of the distribution: `tandem/`."""
    return sorted((ROOT / "tandem").rglob("*.py"))


OLDEST = (3, 10)
NEWER = {
    "asyncio": {"timeout", "timeout_at", "TaskGroup", "Runner", "Barrier"},
    "contextlib": {"chdir"},
    "datetime": {"UTC"},
    "enum": {"StrEnum", "verify", "member", "nonmember", "global_enum", "EnumCheck", "FlagBoundary"},
    "itertools": {"batched"},
    "logging": {"LoggerAdapter[", "getLevelNamesMapping"},
    "tomllib": {"loads", "load"},
    "typing": {"Self", "Unpack", "Never", "LiteralString", "assert_never", "assert_type", "override", "reveal_type"},
}
"""What came with 3.11 and 3.12, of modules that a client is likely to use; `[`: since when it takes type arguments."""


def newer_names(source: str) -> list[str]:
    """Names of `NEWER` that a module uses when it is imported or run, and syntax that Python 3.10 does not read."""
    try:
        tree = ast.parse(source, feature_version=OLDEST)
    except SyntaxError as error:
        return [f"line {error.lineno}: {error.msg}"]
    return [name for node in _run_nodes(tree) for name in _names(node)]


def _run_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """Every node but annotations, which are not evaluated, and what stands under a guard for newer Pythons or types."""
    if isinstance(node, ast.If) and ast.unparse(node.test) in {"TYPE_CHECKING", "sys.version_info >= (3, 11)"}:
        children: list[ast.AST] = list(node.orelse)
    elif isinstance(node, ast.IfExp) and ast.unparse(node.test) == "TYPE_CHECKING":
        children = [node.orelse]
    else:
        skipped = {id(each) for name in ("annotation", "returns") if (each := getattr(node, name, None)) is not None}
        children = [child for child in ast.iter_child_nodes(node) if id(child) not in skipped]
    for child in children:
        yield child
        yield from _run_nodes(child)


def _names(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.ImportFrom) and node.module in NEWER:
        yield from (f"{node.module}.{each.name}" for each in node.names if each.name in NEWER[node.module])
    bracket = "[" if isinstance(node, ast.Subscript) else ""
    used = node.value if isinstance(node, ast.Subscript) else node
    if not isinstance(used, ast.Attribute) or not isinstance(used.value, ast.Name):
        return
    if (name := used.attr + bracket) in NEWER.get(used.value.id, ()):
        yield f"{used.value.id}.{name}"


@pytest.mark.parametrize("file", client_files(), ids=lambda file: str(file.relative_to(ROOT)))
def test_a_module_for_clients_uses_nothing_that_the_oldest_python_lacks(file: Path) -> None:
    assert newer_names(file.read_text()) == []


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("from typing import Self", ["typing.Self"]),
        ("import enum\nclass A(enum.StrEnum): pass", ["enum.StrEnum"]),
        ("async def f():\n    async with asyncio.timeout(1): pass", ["asyncio.timeout"]),
        ("class A(logging.LoggerAdapter[logging.Logger]): pass", ["logging.LoggerAdapter["]),
        ("if TYPE_CHECKING:\n    from typing import Self", []),
        ("def f(a: typing.Self) -> typing.Never: pass", []),
        ("A = logging.LoggerAdapter[int] if TYPE_CHECKING else logging.LoggerAdapter", []),
    ],
)
def test_what_came_later_is_noticed_where_it_is_used(source: str, found: list[str]) -> None:
    assert newer_names(source) == found


def test_the_package_says_the_same() -> None:
    project = tomllib.loads((ROOT / "deploy/client/pyproject.toml").read_text())["project"]
    assert project["requires-python"] == f">={OLDEST[0]}.{OLDEST[1]}"
    assert f"Programming Language :: Python :: {OLDEST[0]}.{OLDEST[1]}" in project["classifiers"]
    assert f"for Python {OLDEST[0]}.{OLDEST[1]} and newer" in (ROOT / "docs/clients.md").read_text()


def test_the_server_s_distribution_holds_no_package_below_tandem() -> None:
    """An editable install would make `tandem` a namespace without modules."""
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]

    assert [name for name in packages if name.split(".")[0] == "tandem"] == []
