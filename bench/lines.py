"""The measures of the house, of checkouts side by side: `python -m bench.lines [DIR …]`; without arguments, this one.

- Lines of Python: the product by room and in all (no test, bench, check, deployment, generated stub), bench, tests.
- Pages of docs/*.md, and lines of those that people write: in every checkout without `_GENERATED`. Bytes of
  bench/LOG.md, docs/performance.md and README.md.
- Docstrings of the product whose subject is a pronoun: they begin with "Of", or have at most 12 words, one of which is
  "it", "they", "those", "one" or "others".
- Options of `serve`, the router and the workers: rows of docs/options.md, but for those of `calls` and removed ones.
- Tuned constants of policy: names in capitals that a module assigns a number, in files named `tuning.py` and in those
  that decide who computes what (`_POLICY`): checkouts without `tuning.py` have them there.
- With `--walk`, the files on each way, as the checkout's own `bench.walk` counts them (a minute each).
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from bench.support.markdown import table

_BESIDE = ("bench", "tests", ".ci", "deploy", "setup.py")
_POLICY = (
    *("router/placement.py", "router/ejection.py", "router/worker_view.py", "router/admission.py"),
    *("worker/admission.py", "worker/budget.py", "prefill_worker/prompt_line.py"),
    *("decode_worker/admission.py", "decode_worker/moves.py", "decode_worker/policy.py"),
    *("decode_worker/chunk_budget.py", "decode_worker/growth.py", "decode_worker/pressure.py"),
)
_GENERATED = ("api.md", "options.md", "performance.md", "troubleshooting.md")
_PRONOUNS = {"it", "they", "those", "one", "others"}
_MOST_WORDS = 12
_CAPITALS = re.compile(r"_?[A-Z][A-Z0-9_]*")
_OPTION = re.compile(r"^\| `--.*? \| .* \| (?!calls )[^|]* \| .* \|$", re.MULTILINE)

Measures = dict[str, str]


def measures(checkout: Path) -> Measures:
    """Everything but the walk. Raises CalledProcessError if it is no checkout."""
    lines = _python_lines(checkout)
    rooms: dict[str, int] = {}
    for file, count in lines.items():
        rooms[file.parts[0]] = rooms.get(file.parts[0], 0) + count
    product = {room: count for room, count in sorted(rooms.items()) if room not in _BESIDE}
    found = {f"product: {room}, lines": f"{count:,}" for room, count in product.items()}
    found["product Python, lines"] = f"{sum(product.values()):,}"
    found |= {f"{room}, lines": f"{rooms.get(room, 0):,}" for room in ("bench", "tests")}
    pages = list((checkout / "docs").glob("*.md"))
    written = sum(len(page.read_text().splitlines()) for page in pages if page.name not in _GENERATED)
    found["docs, pages and written lines"] = f"{len(pages)}, {written:,}"
    for name in ("bench/LOG.md", "docs/performance.md", "README.md"):
        found[f"{name}, bytes"] = f"{(checkout / name).stat().st_size:,}"
    files = [file for file in lines if file.parts[0] in product]
    docstrings = [text for file in files for text in _docstrings((checkout / file).read_text(encoding="utf-8"))]
    unclear = sum(map(is_unclear, docstrings))
    found["docstrings whose subject is a pronoun"] = f"{unclear:,} of {len(docstrings):,}"
    found["options of processes"] = str(len(_OPTION.findall((checkout / "docs/options.md").read_text())))
    policy = [file for file in files if file.name == "tuning.py" or str(file) in _POLICY]
    constants = [file for file in policy for _ in _constants(checkout / file)]
    found["tuned constants of policy"] = f"{len(constants)} in {len(set(constants))} files"
    return found


def _python_lines(checkout: Path) -> dict[Path, int]:
    """By file that git knows or does not ignore."""
    command = ("git", "-C", str(checkout), "ls-files", "--cached", "--others", "--exclude-standard", "*.py")
    names = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    files = [Path(name) for name in dict.fromkeys(names) if "_pb2" not in name and (checkout / name).exists()]
    return {file: len((checkout / file).read_text(encoding="utf-8").splitlines()) for file in files}


def _docstrings(source: str) -> Iterator[str]:
    """Those of modules, classes, functions, and of the names that these assign."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            before: ast.stmt | None = None
            for each in node.body:
                value = each.value if isinstance(each, ast.Expr) else None
                if isinstance(value, ast.Constant) and isinstance(before, ast.AnnAssign | ast.Assign | None):
                    yield str(value.value)
                before = each


def is_unclear(docstring: str) -> bool:
    """Whether a docstring begins with "Of", or is short and holds a pronoun."""
    words = re.findall(r"[\w'`]+", docstring.lower())
    return words[:1] == ["of"] or (len(words) <= _MOST_WORDS and not _PRONOUNS.isdisjoint(words))


def _constants(path: Path) -> Iterator[str]:
    """Names in capitals that a module assigns a number, or a term of numbers."""
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if not isinstance(node, ast.Assign | ast.AnnAssign) or node.value is None:
            continue
        constants = [each.value for each in ast.walk(node.value) if isinstance(each, ast.Constant)]
        if constants and all(type(each) in (int, float) for each in constants):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = (each.id for target in targets for each in ast.walk(target) if isinstance(each, ast.Name))
            yield from (name for name in names if _CAPITALS.fullmatch(name))


def walks(checkout: Path) -> Measures:
    """Files on each way, by the checkout's own `bench.walk`. Raises CalledProcessError."""
    python = checkout / ".venv" / "bin" / "python"
    command = (str(python if python.exists() else sys.executable), "-m", "bench.walk", "--json")
    found = json.loads(subprocess.run(command, cwd=checkout, capture_output=True, text=True, check=True).stdout)
    return {f"files, {way}": str(each["num_files"]) for way, each in found.items()}


def main() -> int:
    """Prints a table, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("where", nargs="*", type=Path, metavar="DIR", default=[Path()])
    parser.add_argument("--walk", action="store_true", help="count the files on the way, too")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    columns = {}
    for each in args.where:
        columns[str(each)] = measures(each.resolve()) | (walks(each.resolve()) if args.walk else {})
    if args.json:
        print(json.dumps(columns, indent=2))
        return 0
    names = dict.fromkeys(name for each in columns.values() for name in each)
    print(table(("measure", *columns), [(name, *(each.get(name, "–") for each in columns.values())) for name in names]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
