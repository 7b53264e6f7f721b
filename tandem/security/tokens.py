"""Bearer tokens from a file: which ones are accepted, whose they are, and which one this process brings.

One token a line, and behind it, if wanted, `name=NAME` and `max-priority=N` (see `Identity`); empty lines and lines
that begin with # do not count. Several tokens make rotation possible: add the new one behind, move callers, put it
first, remove the old one. The first is what this process shows to others, so it is kept as it is; of all, digests are
compared, in constant time.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import re
from dataclasses import dataclass
from pathlib import Path

from tandem.errors import ConfigError
from tandem.security.watched import Watched

OPTION = "--token-file"
MIN_TOKEN_CHARS = 16
MAX_FILE_BYTES = 64 * 1024
_TOKEN = re.compile(rf"[A-Za-z0-9._~+/-]{{{MIN_TOKEN_CHARS},512}}=*")
"""RFC 6750's b64token, long enough not to be guessed."""


_MAX_DIGITS = 11
"""Digits of a number of 32 bits with its sign."""
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")


@dataclass(frozen=True, slots=True)
class Identity:
    """Owner of a token, and the owner's rights."""

    name: str = ""
    """Tokens of one name are of one identity, and so are all without a name: a token can be replaced."""
    max_priority: int | None = None
    """The highest priority of its requests; None = that of all without such a word."""


@dataclass(frozen=True, slots=True)
class _Known:
    first: str
    digests: tuple[bytes, ...]
    identities: tuple[Identity, ...]
    """Identities, in the order of the tokens."""


class Tokens:
    """The tokens of a file, as the file is now."""

    def __init__(self, path: str) -> None:
        """Raises ConfigError if the file cannot be read or holds no token."""
        self._file = Watched("tokens", (path,), lambda: _read(path))

    def identify(self, authorization: str | None) -> Identity | None:
        """Whose token an `Authorization` header (or metadata) shows; None if it is none of these.

        `Bearer TOKEN`, or `Basic` with the token as password, for browsers.
        """
        shown = _shown(authorization or "")
        if shown is None:
            return None
        digest, known = _digest(shown), self._file.get()
        matches = [hmac.compare_digest(digest, each) for each in known.digests]
        # All are compared: how long it takes does not tell which one.
        return known.identities[matches.index(True)] if any(matches) else None

    def allows(self, authorization: str | None) -> bool:
        """Whether the header shows a token of the file."""
        return self.identify(authorization) is not None

    def bearer(self) -> str:
        """The `authorization` value that this process sends."""
        return f"Bearer {self._file.get().first}"


def _read(path: str) -> _Known:
    try:
        with Path(path).open("rb") as file:
            raw = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(OPTION, f"cannot read {path}: {error.strerror}") from error
    if len(raw) > MAX_FILE_BYTES:
        raise ConfigError(OPTION, f"{path} is longer than {MAX_FILE_BYTES} bytes")
    found: dict[str, Identity] = {}
    for number, line in enumerate(raw.decode("utf-8", "replace").splitlines(), 1):
        token, *words = line.split() or [""]
        if not token or token.startswith("#"):
            continue
        if _TOKEN.fullmatch(token) is None:
            wanted = f"a token of {MIN_TOKEN_CHARS} to 512 characters A-Z a-z 0-9 - . _ ~ + /"
            raise ConfigError(OPTION, f"line {number} of {path} is not {wanted}")
        try:
            found.setdefault(token, _identity(words))
        except ValueError:
            wanted = "name=NAME (1 to 64 characters A-Z a-z 0-9 - . _) or max-priority=N"
            raise ConfigError(OPTION, f"line {number} of {path} has behind its token what is not {wanted}") from None
    if not found:
        raise ConfigError(OPTION, f"{path} holds no token")
    return _Known(next(iter(found)), tuple(_digest(token.encode()) for token in found), tuple(found.values()))


def _identity(words: list[str]) -> Identity:
    """From what follows a token. Raises ValueError."""
    name, max_priority = "", None
    for word in words:
        key, _, value = word.partition("=")
        if key == "name" and _NAME.fullmatch(value):
            name = value
        elif key == "max-priority" and len(value) <= _MAX_DIGITS:
            max_priority = int(value)
        else:
            raise ValueError(key)
    return Identity(name, max_priority)


def _shown(authorization: str) -> bytes | None:
    scheme, _, value = authorization.partition(" ")
    match scheme.lower():
        case "bearer":
            return value.strip().encode("utf-8", "surrogatepass")  # of a header that was not UTF-8
        case "basic":
            try:
                return base64.b64decode(value.strip(), validate=True).partition(b":")[2]
            except (binascii.Error, ValueError):  # the latter: not ASCII
                return None
    return None


def _digest(token: bytes) -> bytes:
    return hashlib.sha256(token).digest()
