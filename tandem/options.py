"""Options: how one is declared, read from argv and environment, and written back as argv.

An option is declared once, as a dataclass field made by `option`: section, name, default, help and
bounds (in its parser). A field marked by `grouped` holds another such dataclass; options of equal
name in several groups are one option on the command line. A plain field is a constant. The module knows no option by
name; callers pass the removed ones, each with what to do instead, and both command line and environment refuse them so.
"""

from __future__ import annotations

import argparse
import difflib
import enum
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import Field, dataclass, field, fields
from typing import Any, NoReturn, TypeAlias, TypeVar

from tandem.errors import ConfigError
from tandem.option_values import Parser, boolean, text

ENV_PREFIX = "TANDEM_"

_SERVICE_LINK = re.compile(r"_SERVICE_(HOST|PORT(_\w+)?)$|_PORT(_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)?$")

T = TypeVar("T")

Names: TypeAlias = frozenset[str]
"""Names of options, without the dashes."""


class Section(enum.Enum):
    """Headings of `--help` and of the options page, in their order."""

    FILE = "Configuration file"
    FLEET = "Workers of this server"
    MODEL = "Model"
    ADDRESSES = "Addresses"
    COMPUTE = "Devices and kernels"
    MEMORY = "KV memory and caches"
    BATCHES = "Prompts and batches"
    QUEUE = "Queues and waiting"
    LIMITS = "Limits of a request"
    SECURITY = "Security"
    LOGS = "Logs"
    CALL = "Call"
    INTERNAL = "Internal"
    """Options that `tandem serve` sets, or tests and measurements: neither help nor page shows them."""


@dataclass(frozen=True, slots=True)
class Option:
    """An option as declared."""

    section: Section
    name: str
    """On the command line, without the dashes."""
    help: str
    parse: Parser
    default: Any
    none_word: str | None
    """How None is written, where None is allowed."""

    @property
    def flag(self) -> str:
        """`--name`."""
        return f"--{self.name}"

    @property
    def variable(self) -> str:
        """`TANDEM_NAME`."""
        return ENV_PREFIX + self.name.replace("-", "_").upper()

    @property
    def is_switch(self) -> bool:
        """Whether the option is a pair `--name` / `--no-name`."""
        return isinstance(self.default, bool)

    @property
    def is_list(self) -> bool:
        """Whether the option may be repeated, or given once with commas."""
        return isinstance(self.default, tuple)

    @property
    def shown_values(self) -> str:
        """What may be given, for the help."""
        if not self.parse.words:
            return self.parse.shown
        words = self.parse.words if self.none_word is None else (self.none_word, *self.parse.words)
        return f"{{{','.join(words)}}}"

    @property
    def shown_default(self) -> str:
        """For the help."""
        if self.default is None:
            return self.none_word or "unset"
        if self.is_list:
            return ",".join(self.default) or "none"
        return str(self.default) or "empty"

    def value_of(self, source: str, text: str) -> Any:
        """Parses `text`; raises ConfigError that names `source`, the flag or the variable."""
        if self.none_word is not None and text == self.none_word:
            return None
        try:
            if self.is_list:
                return tuple(self.parse.parse(part.strip()) for part in text.split(",") if part.strip())
            return self.parse.parse(text)
        except ValueError as error:
            raise ConfigError(source, f"{error} (got {text!r})") from error

    def argv_of(self, value: Any) -> list[str]:
        """Returns the arguments that give the option this value."""
        if self.is_switch:
            return [self.flag if value else f"--no-{self.name}"]
        if self.is_list:
            return [f"{self.flag}={','.join(value)}"]
        return [f"{self.flag}={self.none_word if value is None else value}"]


def option(
    section: Section,
    name: str,
    default: Any,
    description: str,
    parse: Parser | None = None,
    *,
    none_word: str | None = None,
) -> Any:
    """A dataclass field that is an option. `parse` defaults to any text; `none_word` spells None."""
    if isinstance(default, bool):
        parse = boolean
    declared = Option(section, name, description, parse or text(), default, none_word)
    return field(default=default, metadata={"option": declared})


def grouped(cls: type[Any], *, own: Iterable[str] = ()) -> Any:
    """A dataclass field that holds the options of `cls`; its fields named in `own` keep their defaults."""
    hidden = frozenset(item.metadata["option"].name for item in fields(cls) if item.name in own)
    return field(default_factory=cls, metadata={"group": cls, "hidden": hidden})


def options_of(cls: type[Any], hidden: Names = frozenset()) -> Iterator[Option]:
    """Every option of a config class and its groups, except those named; names may repeat."""
    for item in fields(cls):
        if "group" in item.metadata:
            yield from options_of(item.metadata["group"], hidden | item.metadata["hidden"])
        elif (declared := _declared(item)) and declared.name not in hidden:
            yield declared


def add_arguments(parser: argparse.ArgumentParser, cls: type[Any], removed: Mapping[str, str]) -> None:
    """Adds each option of `cls` once, under its section. Values stay text; `load_options` checks them."""
    by_name: dict[str, Option] = {}
    for each in options_of(cls):
        by_name.setdefault(each.name, each)
    for section in Section:
        group = parser.add_argument_group(section.value)
        for each in by_name.values():
            if each.section is section:
                _add_argument(group, each)
    for name, instead in removed.items():
        if name not in by_name:
            flags = (f"--{name}", f"--no-{name}")
            parser.add_argument(*flags, action=_Refusal, nargs="?", const=instead, help=argparse.SUPPRESS)


def _add_argument(group: argparse._ArgumentGroup, each: Option) -> None:
    described = f"{each.help} [{each.shown_default}; {each.variable}]".replace("%", "%%")
    if each.section is Section.INTERNAL:
        described = argparse.SUPPRESS
    if each.is_switch:
        group.add_argument(each.flag, action=argparse.BooleanOptionalAction, default=None, help=described)
    else:
        action = "append" if each.is_list else "store"
        group.add_argument(each.flag, action=action, default=None, help=described, metavar=each.shown_values)


class _Refusal(argparse.Action):
    """A removed option; `const` is what to do instead."""

    def __call__(self, parser: argparse.ArgumentParser, *given: object) -> NoReturn:
        parser.exit(2, f"{parser.prog}: error: {given[2]}: removed: {self.const}\n")


@dataclass(frozen=True, slots=True)
class Given:
    """What a process was given, the first before the next: command line, environment, configuration file."""

    namespace: argparse.Namespace
    environ: Mapping[str, str]
    file: Mapping[str, str] = field(default_factory=dict)
    """Texts by option."""

    def value_of(self, each: Option) -> Any:
        """Returns the option's value, else its default. Raises ConfigError that names where a bad value stands."""
        given = getattr(self.namespace, each.name.replace("-", "_"), None)
        if isinstance(given, bool):
            return given
        if isinstance(given, list):
            return each.value_of(each.flag, ",".join(given))
        if given is not None:
            return each.value_of(each.flag, given)
        if each.variable in self.environ:
            return each.value_of(each.variable, self.environ[each.variable])
        if each.name in self.file:
            return each.value_of(f"--config: {each.name}", self.file[each.name])
        return each.default


def load_options(cls: type[T], given: Given, hidden: Names = frozenset()) -> T:
    """Builds `cls`; `hidden` options keep their defaults.

    Raises ConfigError that names the option.
    """
    values: dict[str, Any] = {}
    for item in fields(cls):  # type: ignore[arg-type]  # config classes are dataclasses
        if "group" in item.metadata:
            group_hidden = hidden | item.metadata["hidden"]
            values[item.name] = load_options(item.metadata["group"], given, group_hidden)
        elif (declared := _declared(item)) and declared.name not in hidden:
            values[item.name] = given.value_of(declared)
    return cls(**values)


def argv_of(config: Any, hidden: Names = frozenset()) -> list[str]:
    """The command line that makes an equal config, whatever the environment says."""
    arguments: list[str] = []
    for item in fields(config):
        value = getattr(config, item.name)
        if "group" in item.metadata:
            arguments += argv_of(value, hidden | item.metadata["hidden"])
        elif (declared := _declared(item)) and declared.name not in hidden:
            arguments += declared.argv_of(value)
    return arguments


def _declared(item: Field[Any]) -> Option | None:
    """None for a plain field, which is a constant."""
    return item.metadata.get("option")


def meant(name: str, known: Iterable[str], otherwise: str, prefix: str = "") -> str:
    """Returns which of the `known` names a misspelt one may stand for; `otherwise` if none is near.

    All begin with `prefix`, which makes none of them near.
    """
    close = difflib.get_close_matches(name.removeprefix(prefix), [each.removeprefix(prefix) for each in known], n=1)
    return f"did you mean {prefix}{close[0]}?" if close else otherwise


def check_known(environ: Mapping[str, str], known: Iterable[type[Any]], removed: Mapping[str, str]) -> None:
    """Raises ConfigError for a `TANDEM_` variable that no option of `known` reads, with what `removed` says of it.

    Kubernetes sets some of every service of a namespace, such as of one that is called `tandem-router`: they pass.
    """
    names = {each.variable for cls in known for each in options_of(cls)}
    for name in sorted(environ):
        if name.startswith(ENV_PREFIX) and name not in names and not _SERVICE_LINK.search(name):
            option_name = name.removeprefix(ENV_PREFIX).replace("_", "-").lower()
            if option_name in removed:
                raise ConfigError(name, f"removed: {removed[option_name]}")
            what_to_do = meant(name, names, "`tandem COMMAND --help` lists them, unset it", ENV_PREFIX)
            raise ConfigError(name, f"no option of this name; {what_to_do}")
