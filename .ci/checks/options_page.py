"""Makes docs/options.md of the declared options; `--write` renews it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from shell.config import ClientConfig, DecodeConfig, ElasticConfig, PrefillConfig, RouterConfig, ServeConfig
from tandem.options import Option, options_of

PAGE = Path(__file__).resolve().parents[2] / "docs/options.md"
SERVERS: dict[str, type[Any]] = {
    "serve": ServeConfig,
    "router": RouterConfig,
    "prefill": PrefillConfig,
    "decode": DecodeConfig,
    "worker": ElasticConfig,
}
"""Commands that start processes, and what they read."""
HEAD = """# Options

<!-- made by .ci/checks/options_page.py -->

Every option of every process, as declared in the source. An option is given on the command line, or by its environment
variable; the command line comes first. A switch is `--name` or `--no-name`, and `true` or `false` in its variable.
Sizes take units (`512MiB`, `24GiB`). A `TANDEM_` variable that no option has is refused, so that a misspelt one is
noticed. What options mean together is told where they matter: [operations.md](operations.md), [models.md](models.md),
[kv_transfer.md](kv_transfer.md), [security.md](security.md).
"""
TABLE = "| option | variable | default | |\n| --- | --- | --- | --- |\n"


def page() -> str:
    """The page's text: a table for each set of commands that share options, and one for those that call a server."""
    by_commands: dict[tuple[str, ...], list[str]] = {}
    for name, declared in _by_name(SERVERS).items():
        by_commands.setdefault(tuple(declared), []).append(_row(name, list(declared.values())))
    parts = [HEAD]
    for commands, rows in sorted(by_commands.items(), key=lambda each: -len(each[0])):
        parts.append(f"\n## {_heading(commands)}\n\n{TABLE}{''.join(rows)}")
    rows = [_row(name, list(each.values())) for name, each in _by_name({"": ClientConfig}).items()]
    return "".join([*parts, f"\n## Commands that call a server\n\n{TABLE}{''.join(rows)}"])


def main() -> int:
    """0 if the page is true."""
    if "--write" in sys.argv:
        PAGE.write_text(page())
    elif not PAGE.exists() or PAGE.read_text() != page():
        print("docs/options.md is stale; run python .ci/checks/options_page.py --write")
        return 1
    return 0


def _by_name(commands: dict[str, type[Any]]) -> dict[str, dict[str, Option]]:
    """Of each option, as each command declares it."""
    found: dict[str, dict[str, Option]] = {}
    for command, cls in commands.items():
        for each in options_of(cls):
            found.setdefault(each.name, {}).setdefault(command, each)
    return found


def _heading(commands: tuple[str, ...]) -> str:
    return "All processes" if commands == tuple(SERVERS) else ", ".join(f"`tandem {each}`" for each in commands)


def _row(name: str, declared: list[Option]) -> str:
    first = declared[0]
    defaults = list(dict.fromkeys(each.shown_default for each in declared))
    cells = (_flag(first), f"`{first.variable}`", ", ".join(defaults), "; ".join(_texts(declared)))
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |\n"


def _flag(each: Option) -> str:
    values = "" if each.is_switch or each.shown_values == "VALUE" else f" {each.shown_values}"
    return f"`{each.flag}{values}`"


def _texts(declared: list[Option]) -> Iterator[str]:
    """What the commands say of it; left out is what another one says too, and more."""
    texts = dict.fromkeys(each.help for each in declared)
    return (text for text in texts if not any(each != text and each.startswith(text) for each in texts))


if __name__ == "__main__":
    sys.exit(main())
