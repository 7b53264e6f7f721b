"""Fails on what must not be in a service that reads files and bytes from others.

Banned, under whatever name it was imported:

    runs what it reads      pickle and its kin, torch.load, allow_pickle=True, yaml.load without a safe loader,
                            eval, exec, trust_remote_code, collectives of objects (torch pickles them)
    runs a shell            shell=True, os.system, os.popen
    trusts anybody          ssl._create_unverified_context, ssl.CERT_NONE, check_hostname = False
    says less than it does  NotImplementedError (an option does what it says or is refused by name),
                            os.environ outside tandem/config.py
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from sources import ROOT, python_files

BANNED_MODULES = frozenset({"pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"})
BANNED_NAMES = frozenset(
    {
        *("eval", "exec", "builtins.eval", "builtins.exec", "torch.load", "os.system", "os.popen"),
        *("yaml.unsafe_load", "yaml.unsafe_load_all", "yaml.full_load", "yaml.full_load_all"),
        *("ssl._create_unverified_context", "ssl._create_stdlib_context", "ssl.CERT_NONE", "ssl.CERT_OPTIONAL"),
        "NotImplementedError",
    }
)
OBJECT_COLLECTIVES = ("_object", "_object_list")
"""Ends of names in torch.distributed: all_gather_object, broadcast_object_list, …"""
YAML_LOADS = frozenset({"yaml.load", "yaml.load_all"})
SAFE_LOADERS = frozenset({"yaml.SafeLoader", "yaml.CSafeLoader"})
ENVIRONMENT = frozenset({"os.environ", "os.getenv", "os.putenv"})
MAY_READ_ENVIRONMENT = ("tandem/config.py", "tests/", "bench/", ".ci/")


def findings(tree: ast.Module, name: str) -> Iterator[tuple[int, str]]:
    """Line and complaint for each banned thing in one file."""
    full_names = imported_names(tree)
    for node in ast.walk(tree):
        found = (
            banned_import(node),
            banned_use(node, full_names),
            banned_call(node, full_names),
            banned_environment(node, name, full_names),
        )
        yield from ((getattr(node, "lineno", 1), complaint) for complaint in found if complaint is not None)


def imported_names(tree: ast.Module) -> Mapping[str, str]:
    """What each imported name stands for: `import torch.distributed as dist` makes `dist` torch.distributed."""
    names: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.asname: alias.name for alias in node.names if alias.asname is not None}
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            names |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    return names


def banned_import(node: ast.AST) -> str | None:
    """Modules that run what they read, and names that are banned wherever they come from."""
    if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
        names = [f"{node.module or ''}.{alias.name}" for alias in node.names]
    else:
        return None
    return next((f"imports {name}" for name in names if name.split(".")[0] in BANNED_MODULES or is_banned(name)), None)


def banned_use(node: ast.AST, full_names: Mapping[str, str]) -> str | None:
    """Names, called or not, and attributes set so that a peer goes unchecked."""
    match node:
        case ast.Attribute() | ast.Name():
            name = dotted(node, full_names)
            return f"uses {name}" if is_banned(name) else None
        case ast.Assign(targets=[ast.Attribute(attr="check_hostname")], value=ast.Constant(value=False)):
            return "sets check_hostname = False"
    return None


def banned_call(node: ast.AST, full_names: Mapping[str, str]) -> str | None:
    """Arguments that make a call dangerous."""
    if not isinstance(node, ast.Call):
        return None
    for keyword in node.keywords:
        if keyword.arg in {"trust_remote_code", "allow_pickle", "shell"} and not is_false(keyword.value):
            return f"sets {keyword.arg}={ast.unparse(keyword.value)}"
    function = dotted(node.func, full_names)
    if function in YAML_LOADS:
        loaders = [*node.args[1:2], *(keyword.value for keyword in node.keywords if keyword.arg == "Loader")]
        if not any(dotted(loader, full_names) in SAFE_LOADERS for loader in loaders):
            return f"calls {function} without SafeLoader"
    return None


def banned_environment(node: ast.AST, name: str, full_names: Mapping[str, str]) -> str | None:
    """The environment is read in one file."""
    if name.startswith(MAY_READ_ENVIRONMENT) or not isinstance(node, ast.Attribute | ast.Name):
        return None
    used = dotted(node, full_names)
    return f"uses {used}; only tandem/config.py may" if used in ENVIRONMENT else None


def is_banned(name: str) -> bool:
    """Whether a full name stands for something banned."""
    return name in BANNED_NAMES or (name.startswith("torch.distributed.") and name.endswith(OBJECT_COLLECTIVES))


def is_false(value: ast.expr) -> bool:
    """Whether an argument is the constant False."""
    return isinstance(value, ast.Constant) and value.value is False


def dotted(node: ast.expr, full_names: Mapping[str, str]) -> str:
    """`a.b.c` of a chain of attributes, with its first name as it was before imports; empty for anything else."""
    if isinstance(node, ast.Name):
        return full_names.get(node.id, node.id)
    if isinstance(node, ast.Attribute):
        owner = dotted(node.value, full_names)
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
