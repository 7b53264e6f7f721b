"""Fails on files over 400 lines and functions over 60; prints the medians either way."""

from __future__ import annotations

import ast
import statistics
import sys

from sources import ROOT, python_files

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60


def main() -> int:
    """Exit code 1 if anything is too long."""
    files: list[int] = []
    functions: list[int] = []
    too_long: list[str] = []
    for path in python_files():
        source = path.read_text(encoding="utf-8")
        name = path.relative_to(ROOT)
        files.append(source.count("\n"))
        if files[-1] > MAX_FILE_LINES:
            too_long.append(f"{name}: {files[-1]} lines, more than {MAX_FILE_LINES}")
        for node in ast.walk(ast.parse(source, str(name))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                functions.append((node.end_lineno or node.lineno) - node.lineno + 1)
                if functions[-1] > MAX_FUNCTION_LINES:
                    too_long.append(
                        f"{name}:{node.lineno}: {node.name} has {functions[-1]} lines, more than {MAX_FUNCTION_LINES}"
                    )
    print(
        f"sizes: {len(files)} files, median {statistics.median(files):.0f} lines, longest {max(files)}; "
        f"{len(functions)} functions, median {statistics.median(functions):.0f} lines, longest {max(functions)}"
    )
    print(*too_long, sep="\n", end="\n" if too_long else "", file=sys.stderr)
    return 1 if too_long else 0


if __name__ == "__main__":
    sys.exit(main())
