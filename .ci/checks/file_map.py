"""Keeps the file map of ARCHITECTURE.md equal to the modules' own first lines; `--write` renews it."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "ARCHITECTURE.md"
HEADING = "## One line per file\n"
FOLDERS = (
    *("tandem", "tandem/client", "tandem/cli", "tandem/rpc", "tandem/telemetry", "tandem/security", "tandem/admin"),
    "tandem/foreign",
    *(
        "router",
        "router/kserve",
        "router/vllm",
        "prefill_worker",
        "decode_worker",
        "engine",
        "kvtransfer",
        "kvtransfer/transports",
    ),
    *("models", "models/demo", "kernels", "kernels/cpu", "kernels/triton", "bench", "bench/kernels", "bench/peers"),
)


def first_line(path: Path) -> str:
    """A module's summary. Raises ValueError if it has none."""
    docstring = ast.get_docstring(ast.parse(path.read_text()))
    if docstring is None:
        raise ValueError(f"{path.relative_to(ROOT)} has no docstring")
    return docstring.split("\n\n")[0].replace("\n", " ")


def file_map() -> str:
    """The section, heading included."""
    lines = [HEADING]
    for folder in FOLDERS:
        files = sorted(path for path in (ROOT / folder).glob("*.py") if "_pb2" not in path.name)
        lines.append(f"\n**`{folder}/`** {first_line(ROOT / folder / '__init__.py')}\n\n")
        lines += [f"- `{file.name}` {first_line(file)}\n" for file in files if file.name != "__init__.py"]
    return "".join(lines)


def main() -> int:
    """0 if the page is true."""
    page = PAGE.read_text()
    before = page.partition(HEADING)[0]
    renewed = before + file_map()
    if "--write" in sys.argv:
        PAGE.write_text(renewed)
    elif page != renewed:
        print("ARCHITECTURE.md: the file map is stale; run python .ci/checks/file_map.py --write")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
