"""The served tokenizer's files as a ZIP archive in chunks, for gateways that tokenize by themselves.

The archive is a function of the files: replicas of a router give the same bytes and the same
fingerprint. Weights are never in it.
"""

from __future__ import annotations

import hashlib
import io
import zipfile
from collections.abc import Iterator
from pathlib import Path

from tandem.foreign import smg_common_pb2

_CHUNK_BYTES = 64 * 1024
_PATTERNS = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("config.json", "generation_config.json", "chat_template.json", "*.jinja"),
    *("vocab.json", "merges.txt", "*.model", "*.tiktoken"),
)
_EPOCH = (1980, 1, 1, 0, 0, 0)
"""The earliest time that a ZIP entry can have."""


def archive(checkpoint: Path) -> bytes:
    """Its ZIP archive."""
    files = sorted({file for pattern in _PATTERNS for file in checkpoint.glob(pattern) if file.is_file()})
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for file in files:
            entry = zipfile.ZipInfo(file.name, date_time=_EPOCH)
            archive.writestr(entry, file.read_bytes(), compress_type=zipfile.ZIP_DEFLATED)
    return buffer.getvalue()


def chunks(data: bytes) -> Iterator[smg_common_pb2.GetTokenizerChunk]:
    """Yields the chunks of an archive in order; the last chunk carries the archive's SHA-256."""
    fingerprint = hashlib.sha256(data).hexdigest()
    for start in range(0, len(data), _CHUNK_BYTES):
        is_last = start + _CHUNK_BYTES >= len(data)
        yield smg_common_pb2.GetTokenizerChunk(
            data=data[start : start + _CHUNK_BYTES], sha256=fingerprint if is_last else ""
        )
