"""The command line of a process: refused in one line that says what is wrong and what may be meant; exit codes."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any, NoReturn

from tandem.options import meant

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_BAD_CONFIG = 2
"""A bad option, environment variable, model folder or limit of the operating system."""


class CommandLine(argparse.ArgumentParser):
    """A parser of one command. A refusal is one line on stderr, without the usage, and exit code 2."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**{"allow_abbrev": False, **settings})

    def format_help(self) -> str:
        """Returns the help in colours, where it goes to a terminal."""
        from shell.help import Help  # here: it takes as long to import as a whole `tandem --version`

        self.formatter_class = Help
        return super().format_help()

    def error(self, message: str) -> NoReturn:
        """Ends the process."""
        self.exit(EXIT_BAD_CONFIG, f"{self.prog}: error: {message.removeprefix('argument ')}\n")

    def parse_known_args(  # type: ignore[override]  # overloads that nobody here needs
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        """Returns the namespace; ends the process for an unknown option, with the one that may be meant."""
        parsed, unknown = super().parse_known_args(args, namespace)
        if unknown:
            name = next((each for each in unknown if each.startswith("-")), unknown[0]).partition("=")[0]
            shown = (action for action in self._actions if action.help is not argparse.SUPPRESS)
            known = [flag for action in shown for flag in action.option_strings]
            what = "no such option" if name.startswith("-") else "not expected here"
            told = meant(name, known, f"`{self.prog} --help` lists what there is", "--")
            self.error(f"{name}: {what}; {told}")
        return parsed, []
