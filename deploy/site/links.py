"""Hook of MkDocs: links to what lies outside of docs/ become its path in the source, for the site lacks it."""

from __future__ import annotations

import re
from typing import Any

_OUTSIDE = re.compile(r"\[([^]]+)\]\(\.\./([^)#]+)[^)]*\)")


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Called for each page before it is rendered."""
    return _OUTSIDE.sub(r"\1 (`\2` in the source)", markdown)
