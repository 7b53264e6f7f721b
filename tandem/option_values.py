"""How an option's text becomes a value: each function here makes a parser with its bounds.

A parser raises ValueError that says what is allowed; `options` adds the option's name.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from typing import Any


@dataclass(frozen=True, slots=True)
class Parser:
    """Text of one option to its value."""

    shown: str
    """Kind of value, as help shows it: SIZE, HOST:PORT."""
    parse: Callable[[str], Any]
    """Raises ValueError that says what is allowed."""
    words: tuple[str, ...] = ()
    """Allowed texts, where there are few; empty = the parser alone knows."""


def text(pattern: str = r".*", meaning: str = "text", shown: str = "TEXT") -> Parser:
    """Text that matches `pattern` whole."""
    compiled = re.compile(pattern, re.DOTALL)

    def parse(value: str) -> str:
        if not compiled.fullmatch(value):
            raise ValueError(f"must be {meaning}")
        return value

    return Parser(shown, parse)


def one_of(*words: str) -> Parser:
    """A word of a list."""

    def parse(value: str) -> str:
        if value not in words:
            raise ValueError(f"must be one of {', '.join(words)}")
        return value

    return Parser("WORD", parse, words)


def integer(low: int, high: int = 2**31 - 1) -> Parser:
    """A whole number in `[low, high]`."""

    def parse(value: str) -> int:
        if not re.fullmatch(r"[+-]?\d{1,12}", value) or not low <= int(value) <= high:
            raise ValueError(f"must be a whole number from {low} to {high}")
        return int(value)

    return Parser("N", parse)


def number(low: float, high: float, what: str = "a number", shown: str = "NUMBER") -> Parser:
    """A number in `[low, high]`."""

    def parse(value: str) -> float:
        try:
            parsed = float(value)
        except ValueError:
            parsed = float("nan")
        if not low <= parsed <= high:  # false for NaN too
            raise ValueError(f"must be {what} from {low:g} to {high:g}")
        return parsed

    return Parser(shown, parse)


def seconds(low: float, high: float = 86_400.0) -> Parser:
    """A number of seconds in `[low, high]`."""
    return number(low, high, "a number of seconds", "SECONDS")


_UNITS = {"": 1, "k": 1000, "m": 1000**2, "g": 1000**3, "ki": 1024, "mi": 1024**2, "gi": 1024**3, "ti": 1024**4}


def size_bytes(low: int = 1) -> Parser:
    """Bytes, with an optional unit: `4096`, `512MiB`, `2GiB`, `1GB`."""

    def parse(value: str) -> int:
        found = re.fullmatch(r"(\d{1,18})(?:\.(\d{1,6}))?\s*([a-z]*?)b?", value.strip().lower())
        if not found or found[3] not in _UNITS:
            raise ValueError("must be a size such as 4096, 512MiB or 2GiB")
        size, unit = Decimal(f"{found[1]}.{found[2] or 0}"), _UNITS[found[3]]
        if (num_bytes := round(size * unit)) < low:
            raise ValueError(f"must be at least {low} bytes")
        return num_bytes

    return Parser("SIZE", parse)


@dataclass(frozen=True, slots=True)
class Share:
    """A part of what there is. As text: `90%`."""

    percent: float

    def __str__(self) -> str:
        return f"{self.percent:g}%"

    def of(self, total_bytes: int) -> float:
        """Returns so much of it, in bytes."""
        return total_bytes * self.percent / 100


def size_or_share() -> Parser:
    """Bytes as `size_bytes` has them, or a share such as `90%`."""
    size, percent = size_bytes(), number(1, 100, "a size, or a share in percent")

    def parse(value: str) -> int | Share:
        return Share(percent.parse(value[:-1])) if value.endswith("%") else int(size.parse(value))

    return Parser("SIZE", parse)


@dataclass(frozen=True, slots=True)
class SizedFolder:
    """A folder and the size of what may lie there. As text: `DIR=100GiB`."""

    path: str
    size_bytes: int

    def __str__(self) -> str:
        return f"{self.path}={self.size_bytes}"

    @classmethod
    def of_text(cls, text: str) -> SizedFolder:
        """Raises ValueError that says what is allowed."""
        path, _, size = text.rpartition("=")
        if not path:
            raise ValueError("must be DIR=SIZE, such as /mnt/nvme=100GiB")
        return cls(path, size_bytes().parse(size))


sized_folder = Parser("DIR=SIZE", SizedFolder.of_text)


def host_port(*, port_zero: bool = False) -> Parser:
    """`HOST:PORT` or `[IPV6]:PORT`; port 0, "any free", only where `port_zero`."""

    def parse(value: str) -> str:
        found = re.fullmatch(r"(\[[0-9a-fA-F:.%a-z]+\]|[^\s:\[\],/]+):(\d{1,5})", value)
        if not found or not (0 if port_zero else 1) <= int(found[2]) <= 65535:
            raise ValueError("must be HOST:PORT")
        return value

    return Parser("HOST:PORT", parse)


def _zmq_address(value: str) -> str:
    if not re.fullmatch(r"tcp://(\[[0-9a-fA-F:.%a-z]+\]|[^\s:\[\],/]+):\d{1,5}|ipc://\S+", value):
        raise ValueError("must be tcp://HOST:PORT or ipc://PATH")
    return value


zmq_address = Parser("ADDRESS", _zmq_address)
"""Where ZeroMQ binds: `tcp://HOST:PORT`, of which HOST may be `*`, or `ipc://PATH`."""


def _boolean(value: str) -> bool:
    word = value.strip().lower()
    if word in {"1", "true", "yes", "on"}:
        return True
    if word in {"0", "false", "no", "off"}:
        return False
    raise ValueError("must be true or false")


boolean = Parser("BOOLEAN", _boolean)
"""`true`, `false`, `1`, `0`, `yes`, `no`, `on`, `off`."""
