"""What a prefix cache has done in its life: counted by its parts, read by whoever reports."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class CacheCounters:
    """Tokens asked for and found, and blocks by what became of them."""

    asked_tokens: int = 0
    """Tokens of the sequences that `acquire` was called for."""
    hit_tokens: int = 0
    """Asked tokens that were found."""
    evicted_blocks: int = 0
    """Blocks of the pool that were made free for other sequences."""
    host_stored_blocks: int = 0
    """Blocks that were moved to the host tier."""
    host_loaded_blocks: int = 0
    """Blocks that came back from there."""
    disk_stored_blocks: int = 0
    """Blocks that were moved on to the disk tier."""
    disk_loaded_blocks: int = 0
    """Blocks that came back from there to the host tier."""
    disk_failed_blocks: int = 0
    """Blocks that were lost because the disk failed, or because it gave back other bytes."""
