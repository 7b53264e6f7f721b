"""No option does nothing: each field of a process's config is read by that process's code."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from shell.config import DecodeConfig, PrefillConfig, RouterConfig

ROOT = Path(__file__).parents[2]
WORKER_ROOMS = ("engine", "worker")
READ_BY_LOAD = {"config_file"}
"""What says where the others are given."""


@pytest.mark.parametrize(
    ("config", "rooms"),
    [
        (RouterConfig, ("router",)),
        (PrefillConfig, ("prefill_worker", *WORKER_ROOMS)),
        (DecodeConfig, ("decode_worker", *WORKER_ROOMS)),
    ],
)
def test_every_option_is_read(config: type, rooms: tuple[str, ...]) -> None:
    code = "\n".join(path.read_text() for room in rooms for path in (ROOT / room).rglob("*.py"))

    names = {field.name for field in dataclasses.fields(config)} - READ_BY_LOAD
    unread = [name for name in names if not re.search(rf"config\.{name}\b", code)]

    assert unread == []
