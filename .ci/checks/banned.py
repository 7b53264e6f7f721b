"""Fails on what must not be in a service that reads files and bytes from others.

Banned, under whatever name it was imported:

    runs what it reads      pickle and its kin, torch.load, allow_pickle=True, yaml.load without a safe loader,
                            eval, exec, trust_remote_code, collectives of objects (torch pickles them)
    runs a shell            shell=True, os.system, os.popen, subprocess.getoutput, pty.spawn, …
    trusts anybody          ssl._create_unverified_context, ssl.CERT_NONE, check_hostname or verify_mode less than full
    says less than it does  NotImplementedError (an option does what it says or is refused by name),
                            os.environ outside shell/config.py
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from sources import ROOT, python_files

BANNED_MODULES = frozenset({"pickle", "_pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"})
BANNED_NAMES = frozenset(
    {
        *("eval", "exec", "builtins.eval", "builtins.exec", "torch.load", "torch.serialization.load"),
        *("os.system", "os.popen", "subprocess.getoutput", "subprocess.getstatusoutput", "pty.spawn"),
        *("asyncio.create_subprocess_shell", "asyncio.subprocess.create_subprocess_shell"),
        *("yaml.unsafe_load", "yaml.unsafe_load_all", "yaml.full_load", "yaml.full_load_all"),
        *("ssl._create_unverified_context", "ssl._create_stdlib_context", "ssl.CERT_NONE", "ssl.CERT_OPTIONAL"),
        *("ssl.VerifyMode.CERT_NONE", "ssl.VerifyMode.CERT_OPTIONAL"),
        "NotImplementedError",
    }
)
OBJECT_COLLECTIVES = ("_object", "_object_list")
"""Ends of names in torch.distributed: all_gather_object, broadcast_object_list, …"""
YAML_LOADS = frozenset({"yaml.load", "yaml.load_all"})
SAFE_LOADERS = frozenset({"yaml.SafeLoader", "yaml.CSafeLoader", "yaml.BaseLoader"})
IMPORTERS = frozenset({"importlib.import_module", "importlib.__import__", "builtins.__import__", "__import__"})
ALLOW_PICKLE_AT = 2
"""Place of numpy.load's `allow_pickle`."""
CHECKS_OF_PEERS = {"check_hostname": {"True"}, "verify_mode": {"ssl.CERT_REQUIRED", "ssl.VerifyMode.CERT_REQUIRED"}}
"""Attributes of an SSLContext, and all that they may be set to."""
ENVIRONMENT = frozenset({"os.environ", "os.environb", "os.getenv", "os.putenv"})
MAY_READ_ENVIRONMENT = ("shell/config.py", "tandem/rpc/__init__.py", "tests/", "bench/", ".ci/")


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
        case ast.Assign():
            for target in (inner for outer in node.targets for inner in ast.walk(outer)):
                if isinstance(target, ast.Attribute) and target.attr in CHECKS_OF_PEERS:
                    value = dotted(node.value, full_names) or ast.unparse(node.value)
                    if value not in CHECKS_OF_PEERS[target.attr]:
                        return f"sets {target.attr} = {value}"
    return None


def banned_call(node: ast.AST, full_names: Mapping[str, str]) -> str | None:
    """Arguments that make a call dangerous."""
    if not isinstance(node, ast.Call):
        return None
    function = dotted(node.func, full_names)
    for name, value in named_arguments(node, function):
        if name in {"trust_remote_code", "allow_pickle", "shell"} and not is_false(value):
            return f"sets {name}={ast.unparse(value)}"
    if function in IMPORTERS:
        modules = [*node.args[:1], *(keyword.value for keyword in node.keywords if keyword.arg == "name")]
        names = [str(module.value) for module in modules if isinstance(module, ast.Constant)]
        return next((f"imports {name}" for name in names if name.split(".")[0] in BANNED_MODULES), None)
    if function in YAML_LOADS:
        loaders = [*node.args[1:2], *(keyword.value for keyword in node.keywords if keyword.arg == "Loader")]
        if not any(dotted(loader, full_names) in SAFE_LOADERS for loader in loaders):
            return f"calls {function} without SafeLoader"
    return None


def named_arguments(call: ast.Call, function: str) -> Iterator[tuple[str, ast.expr]]:
    """Arguments by name, also those of `**{…}` and the one that numpy.load takes by place."""
    for keyword in call.keywords:
        if keyword.arg is not None:
            yield keyword.arg, keyword.value
        elif isinstance(keyword.value, ast.Dict):
            pairs = zip(keyword.value.keys, keyword.value.values, strict=True)
            yield from ((str(key.value), value) for key, value in pairs if isinstance(key, ast.Constant))
    if function == "numpy.load":
        yield from (("allow_pickle", value) for value in call.args[ALLOW_PICKLE_AT:][:1])


def banned_environment(node: ast.AST, name: str, full_names: Mapping[str, str]) -> str | None:
    """The environment is read in one file."""
    if name.startswith(MAY_READ_ENVIRONMENT) or not isinstance(node, ast.Attribute | ast.Name):
        return None
    used = dotted(node, full_names)
    return f"uses {used}; only shell/config.py may" if used in ENVIRONMENT else None


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
