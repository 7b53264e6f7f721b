"""Makes docs/options.md of the declared options; `--write` renews it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from shell.config import ClientConfig, DecodeConfig, ElasticConfig, PrefillConfig, RouterConfig, ServeConfig
from shell.removed_options import REMOVED
from tandem.options import Option, Section, options_of

PAGE = Path(__file__).resolve().parents[2] / "docs/options.md"
COMMANDS: dict[str, type[Any]] = {
    "serve": ServeConfig,
    "router": RouterConfig,
    "prefill": PrefillConfig,
    "decode": DecodeConfig,
    "worker": ElasticConfig,
    "calls": ClientConfig,
}
"""Commands, and what they read; `calls` are all that call a server."""
PROCESSES = frozenset(COMMANDS) - {"calls"}
MOST_OPTIONS = 63
"""Of processes that serve: somebody must read them all to find the one to turn. 60, --activations, --config, which
holds them, and --tensor-parallel."""
HEAD = """# Options

<!-- made by .ci/checks/options_page.py -->

All {count} options of the processes that serve, and those of commands that call them, in the groups of `--help`. An
option is given on the command line, or by its environment variable, `TANDEM_` and its name (`TANDEM_KV_MEMORY`); the
command line comes first. A switch is `--name` or `--no-name`, and `true` or `false` in its variable. Sizes take units
(`512MiB`, `24GiB`). A `TANDEM_` variable that no option has is refused, so that a misspelt one is noticed. What options
mean together: [operations.md](operations.md), [models.md](models.md), [kv_transfer.md](kv_transfer.md),
[security.md](security.md).

`tandem serve`, `router`, `prefill`, `decode` and `worker` also read a file, `tandem serve --config tandem.yaml`, after
command line and environment. It has the same names, and values as on the command line; a switch is `true` or `false`:

```yaml
model: /models/llama
kv-memory: 24GiB
prefix-cache: false
device: [cuda:0, cuda:1]
```

A name that the command does not have is refused, with the nearest one. `tandem doctor --config FILE` checks the model
and the options of a worker's file.
"""
TABLE = "| option | default | of | |\n| --- | --- | --- | --- |\n"


def page() -> str:
    """Returns the page's text: a table for each section, and one of removed options."""
    shown = _by_name()
    parts = [HEAD.format(count=len(of_processes()))]
    for section in Section:
        rows = [_row(each) for each in shown.values() if next(iter(each.values())).section is section]
        if rows:
            parts.append(f"\n## {section.value}\n\n{TABLE}{''.join(rows)}")
    removed = "".join(f"| `--{name}` | {instead} |\n" for name, instead in sorted(REMOVED.items()))
    return "".join([*parts, f"\n## Removed options\n\n| option | instead |\n| --- | --- |\n{removed}"])


def of_processes() -> list[str]:
    """Returns the names of the options that the processes that serve show."""
    return [name for name, declared in _by_name().items() if PROCESSES & declared.keys()]


def main() -> int:
    """Returns 0 if the page is up to date and not too long."""
    if (count := len(of_processes())) > MOST_OPTIONS:
        print(f"{count} options are more than {MOST_OPTIONS}: make one a constant, derive it, or merge it")
        return 1
    if "--write" in sys.argv:
        PAGE.write_text(page())
    elif not PAGE.exists() or PAGE.read_text() != page():
        print("docs/options.md is stale; run python .ci/checks/options_page.py --write")
        return 1
    return 0


def _by_name() -> dict[str, dict[str, Option]]:
    """Returns each option that is shown, as each command declares it."""
    found: dict[str, dict[str, Option]] = {}
    for command, cls in COMMANDS.items():
        for each in options_of(cls):
            if each.section is not Section.INTERNAL:
                found.setdefault(each.name, {}).setdefault(command, each)
    return found


def _row(by_command: dict[str, Option]) -> str:
    declared = list(by_command.values())
    defaults = list(dict.fromkeys(each.shown_default for each in declared))
    commands = "all" if by_command.keys() >= PROCESSES else ", ".join(by_command)
    cells = (_flag(declared[0]), ", ".join(defaults), commands, "; ".join(_texts(declared)))
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |\n"


def _flag(each: Option) -> str:
    values = "" if each.is_switch else f" {each.shown_values}"
    return f"`{each.flag}{values}`"


def _texts(declared: list[Option]) -> Iterator[str]:
    """What the commands say of it; left out is what another one says too, and more."""
    texts = dict.fromkeys(each.help for each in declared)
    return (text for text in texts if not any(each != text and each.startswith(text) for each in texts))


if __name__ == "__main__":
    sys.exit(main())
