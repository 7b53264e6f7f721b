"""How `--help` looks: the groups as they are, in colours on a terminal, and a usage of one line."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from typing import Any

from rich_argparse import RichHelpFormatter

_FEW = 8
"""More options than these are read in their groups, not in the usage."""


class Help(RichHelpFormatter):
    """Formatter of every command. Brackets in a text are no markup, as `[default; VARIABLE]` has some."""

    group_name_formatter = str
    help_markup = False
    text_markup = False

    def add_usage(self, usage: str | None, actions: Iterable[argparse.Action], groups: Any, prefix: Any = None) -> None:
        """Leaves out options that are many."""
        shown = [each for each in actions if each.help is not argparse.SUPPRESS]
        others = [each for each in shown if not each.option_strings or each.required]
        if len(shown) - len(others) > _FEW:
            self._prog, shown, groups = f"{self._prog} [OPTIONS]", others, ()
        super().add_usage(usage, shown, groups, prefix)
