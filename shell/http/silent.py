"""A logger without handlers, for aiohttp: it logs a stack for each request that cannot be parsed, and anybody can send
those.
"""

from __future__ import annotations

import logging

SILENT = logging.Logger("aiohttp's own")
SILENT.addHandler(logging.NullHandler())
