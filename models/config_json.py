"""Typed reading of a checkpoint's JSON: every complaint names the file and the key."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from models.files.language_part import CONTAINERS, TEXT_CONFIG, language_config
from tandem.errors import CheckpointError


class ConfigJson:
    """One JSON object of a file; `prefix` is where it lies within the file."""

    __slots__ = ("_prefix", "is_language_part", "items", "path")

    def __init__(self, path: Path, items: Mapping[str, Any], prefix: str = "") -> None:
        self.path = path
        self.items = items
        self._prefix = prefix
        self.is_language_part = False
        """Whether it stands for the language part of a checkpoint that takes images too."""

    @classmethod
    def read(cls, path: Path, *, optional: bool = False) -> ConfigJson:
        """Reads `path`; an absent file that is `optional` gives an empty object.

        Raises CheckpointError if the file is missing or holds no JSON object.
        """
        if optional and not path.exists():
            return cls(path, {})
        try:
            items = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError as error:
            raise CheckpointError(f"{path}: file is missing") from error
        except (OSError, ValueError, RecursionError) as error:
            raise CheckpointError(f"{path}: cannot be read as JSON: {error}: download it again") from error
        if not isinstance(items, dict):
            raise CheckpointError(f"{path}: is not a JSON object")
        return cls(path, items)

    def language_part(self) -> ConfigJson:
        """What it says of the language part, as a text model's would. Raises CheckpointError."""
        container = CONTAINERS.get(self.text("model_type"))
        if container is None:
            return self
        if self.has("architectures") and container.architecture not in self.texts("architectures"):
            raise self.error("architectures", f"{container.architecture} is the only one served")
        prefix = f"{TEXT_CONFIG}." if self.has(TEXT_CONFIG) else ""
        self.section(TEXT_CONFIG)
        part = ConfigJson(self.path, language_config(self.items), prefix)
        part.is_language_part = True
        return part

    def error(self, key: str, problem: str) -> CheckpointError:
        """The error to raise about `key`."""
        return CheckpointError(f"{self.path}: {self._prefix}{key}: {problem}")

    def has(self, key: str) -> bool:
        """Whether `key` is there and not null."""
        return self.items.get(key) is not None

    def mentions(self, key: str) -> bool:
        """Whether `key` is there, null or not."""
        return key in self.items

    def section(self, key: str) -> ConfigJson:
        """Returns the object under `key`; an absent or null key gives an empty object."""
        value = self.items.get(key)
        if value is None:
            return ConfigJson(self.path, {}, f"{self._prefix}{key}.")
        if not isinstance(value, dict):
            raise self.error(key, "is not an object")
        return ConfigJson(self.path, value, f"{self._prefix}{key}.")

    def sections(self) -> tuple[ConfigJson, ...]:
        """Returns every object directly within this object."""
        return tuple(self.section(key) for key, value in self.items.items() if isinstance(value, dict))

    def integer(self, key: str, default: int | None = None, minimum: int = 1) -> int:
        """An integer of at least `minimum`; required if there is no default."""
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise self.error(key, f"is {value!r}, not an integer of at least {minimum}")
        return value

    def number(self, key: str, default: float | None = None, *, is_signed: bool = False) -> float:
        """A finite number, positive unless it `is_signed`; required if there is no default."""
        value = self._value(key, default)
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
        if not is_number or (value <= 0 and not is_signed):
            raise self.error(key, f"is {value!r}, not a {'finite' if is_signed else 'positive'} number")
        return float(value)

    def flag(self, key: str, *, default: bool) -> bool:
        """A boolean."""
        value = self._value(key, default)
        if not isinstance(value, bool):
            raise self.error(key, f"is {value!r}, not true or false")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        """A string; required if there is no default."""
        value = self._value(key, default)
        if not isinstance(value, str):
            raise self.error(key, f"is {value!r}, not a string")
        return value

    def texts(self, key: str) -> tuple[str, ...]:
        """A list of strings."""
        value = self._value(key, None)
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self.error(key, "is not a list of strings")
        return tuple(value)

    def integers(self, key: str) -> tuple[int, ...]:
        """A list of integers."""
        value = self._value(key, None)
        if not isinstance(value, list) or any(isinstance(item, bool) or not isinstance(item, int) for item in value):
            raise self.error(key, "is not a list of integers")
        return tuple(value)

    def numbers(self, key: str) -> tuple[float, ...]:
        """A list of positive finite numbers."""
        value = self._value(key, None)
        if not isinstance(value, list):
            raise self.error(key, "is not a list of numbers")
        each = ConfigJson(self.path, {str(place): item for place, item in enumerate(value)}, f"{self._prefix}{key}.")
        return tuple(each.number(str(place)) for place in range(len(value)))

    def text_map(self, key: str) -> dict[str, str]:
        """An object whose values are strings."""
        items = self.section(key).items
        if not all(isinstance(item, str) for item in items.values()):
            raise self.error(key, "is not an object of strings")
        return {name: str(item) for name, item in items.items()}

    def _value(self, key: str, default: object) -> Any:
        value = self.items.get(key)
        if value is None:
            value = default
        if value is None:
            raise self.error(key, "is missing")
        return value
