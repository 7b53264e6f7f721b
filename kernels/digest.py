"""A 64-bit digest of each block of a pool, computed where the pool lies: 8 bytes per block reach the host.

`mix64` takes a block's bytes as little-endian 64-bit words, the last one filled with zeros. Each word is mixed with its
place, and the results are added, all modulo 2^64:

    digest = sum over i of mix(word_i + (i + 1) * 0x9E3779B97F4A7C15)

`mix` is the finalizer of SplitMix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, 2014), a
bijection. A sum does not depend on its order, so threads may add in any; the place does, so a moved word counts.

What it finds: a change of one word, always; any other change that nobody made on purpose (words moved, blocks torn or
mixed up) but for one in 2^64. It is no protection against somebody who constructs a second block.
"""

from __future__ import annotations

import torch

from kernels import triton
from kernels.spec import Dims

MIX64 = "mix64"
"""The digest's name, by which two sides agree."""
WORD_BYTES = 8
_WORDS_AT_A_TIME = 1 << 20
"""Words that the plain version reads at a time, which bounds its memory beside the pool."""

GOLDEN, MIX_1, MIX_2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
"""SplitMix64's constants."""


def digest_blocks(blocks: torch.Tensor, block_ids: torch.Tensor) -> torch.Tensor:
    """The digests `[n]` int64 (64 bits, sign without meaning) of the named blocks, on their device.

    `blocks` `[N, block_bytes]` uint8, rows contiguous; `block_ids` `[n]` int64 on the same device, each in `[0, N)`.
    Queued on the current stream, nothing is waited for. Raises InternalError on other shapes.
    """
    check(blocks, block_ids)
    aligned = not any(size % WORD_BYTES for size in (blocks.shape[1], blocks.stride(0), blocks.data_ptr()))
    if aligned and triton.obstacle(blocks.device, torch.float32) is None:
        from kernels.triton.digest import digest_blocks as digest_on_device

        return digest_on_device(blocks, block_ids)
    return reference_digests(blocks, block_ids)


def as_unsigned(digests: torch.Tensor) -> tuple[int, ...]:
    """Returns digests as u64, the form in which digests travel. Waits for the device."""
    return tuple(digest & ((1 << 64) - 1) for digest in digests.tolist())


def check(blocks: torch.Tensor, block_ids: torch.Tensor) -> None:
    """Raises InternalError unless the arguments are as `digest_blocks` wants them."""
    dims = Dims()
    dims.check("blocks", blocks, ("N", "block_bytes"), torch.uint8, blocks.device)
    dims.check("block_ids", block_ids, ("n",), torch.int64, blocks.device)


def reference_digests(blocks: torch.Tensor, block_ids: torch.Tensor) -> torch.Tensor:
    """`digest_blocks` in plain torch, on any device and for blocks of any size."""
    num_words = -(-blocks.shape[1] // WORD_BYTES)
    places = torch.arange(1, num_words + 1, device=blocks.device) * _signed(GOLDEN)  # [words]
    pieces = [
        _mix(_words(blocks[some], num_words) + places).sum(1)
        for some in torch.split(block_ids, max(1, _WORDS_AT_A_TIME // max(1, num_words)))
    ]
    return torch.cat(pieces) if pieces else block_ids.new_empty(0)


def _words(rows: torch.Tensor, num_words: int) -> torch.Tensor:
    """`[n, block_bytes]` uint8 → `[n, words]` int64."""
    filled = torch.nn.functional.pad(rows, (0, num_words * WORD_BYTES - rows.shape[1]))
    return filled.contiguous().view(torch.int64)


def _signed(word: int) -> int:
    """The int64 with the same bits."""
    return word - (1 << 64) if word >> 63 else word


def _mix(words: torch.Tensor) -> torch.Tensor:
    words = (words ^ _shifted(words, 30)) * _signed(MIX_1)
    words = (words ^ _shifted(words, 27)) * _signed(MIX_2)
    return words ^ _shifted(words, 31)


def _shifted(words: torch.Tensor, bits: int) -> torch.Tensor:
    """To the right, filled with zeros: torch's own shift keeps the sign."""
    return (words >> bits) & ((1 << (64 - bits)) - 1)
