"""One life of one process, told apart from all others."""

from __future__ import annotations

import secrets

from tandem.types import Incarnation


def new_incarnation() -> Incarnation:
    """32 hex digits, drawn anew."""
    return Incarnation(secrets.token_hex(16))
