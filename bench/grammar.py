"""What structured output costs a step besides its forward pass: `python -m bench.grammar`.

Sequences write random texts that a JSON schema allows, as a model at a very high temperature would. For each step, all
their masks are made as a worker makes them. Printed as JSON: a compile, the masks of a step (median and worst), and
which share of all tokens had no alternative, so that no forward pass was needed to know them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Collection
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from engine.draws import TokenMask
from engine.guides import Guide, Guides
from models.files.checkpoint import read_checkpoint
from models.grammar import GrammarCompiler
from tandem.types import Constraint, Language, TokenId

_SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "email": {"type": "string", "pattern": "[a-z]{2,12}@[a-z]{2,12}\\.org"},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}},
    },
    "required": ["name", "email", "age", "tags"],
    "additionalProperties": False,
}
_CONSTRAINT = Constraint(Language.JSON_SCHEMA, (json.dumps(_SCHEMA),))
_EOS = TokenId(0)


@dataclass(frozen=True, slots=True)
class MaskCost:
    """Of one batch."""

    vocab_size: int
    num_seqs: int
    compile_ms: float
    step_ms: float
    """Median: tokens taken, masks made, both in the thread, and the way there and back."""
    worst_step_ms: float
    forced_share: float
    """Of all tokens drawn, those with one bit in their mask."""


async def measure(
    compiler: GrammarCompiler, vocab_size: int, ends: Collection[TokenId], num_seqs: int, num_steps: int
) -> MaskCost:
    """Runs `num_seqs` sequences at once; one that ends is begun again."""
    guides, rng = Guides(compiler), random.Random(0)
    compiler.tokenizer()
    began_s = time.perf_counter()
    running = list(await _begin(guides, num_seqs))
    compile_s = time.perf_counter() - began_s
    times_s, num_forced = [], 0
    for _ in range(num_steps):
        for at, guide in enumerate(running):
            ids = _allowed(guide.mask)
            num_forced += len(ids) == 1
            token_id = TokenId(int(rng.choice(ids)))
            if token_id in ends:
                (running[at],) = await _begin(guides, 1)
            else:
                guide.append(token_id)
        made = asyncio.Event()
        began_s = time.perf_counter()
        guides.follow(running)
        guides.start(made.set)
        await made.wait()
        times_s.append(time.perf_counter() - began_s)
    guides.close()
    return MaskCost(
        vocab_size=vocab_size,
        num_seqs=num_seqs,
        compile_ms=compile_s * 1e3,
        step_ms=statistics.median(times_s) * 1e3,
        worst_step_ms=max(times_s) * 1e3,
        forced_share=num_forced / (num_seqs * num_steps),
    )


async def _begin(guides: Guides, num_seqs: int) -> tuple[Guide, ...]:
    begun: asyncio.Future[tuple[Guide, ...]] = asyncio.get_running_loop().create_future()
    guides.begin(_CONSTRAINT, [()] * num_seqs, begun.set_result, begun.set_exception)
    return await begun


def _allowed(mask: TokenMask | None) -> list[int]:
    bits = np.unpackbits(np.asarray(mask).view(np.uint8), bitorder="little")
    return [int(bit) for bit in np.flatnonzero(bits)]


def _wide_tokenizer(vocab_size: int) -> Tokenizer:
    """Every byte, and pieces of words as a large vocabulary has them: letters behind a space or not."""
    rng = random.Random(0)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces = dict.fromkeys(["<end>", *alphabet])
    while len(pieces) < vocab_size:
        word = "".join(rng.choices("etaoinshrdlucmfwypvbgkjqxz", k=rng.randint(2, 9)))
        pieces["Ġ" * rng.randint(0, 1) + word] = None
    tokenizer = Tokenizer(models.BPE(vocab={piece: number for number, piece in enumerate(pieces)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>"])
    return tokenizer


def main() -> None:
    """Prints a list of `MaskCost`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seqs", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--vocab-size", type=int, default=128_256, help="of the made-up tokenizer")
    options = parser.parse_args()
    demo = read_checkpoint("demo")
    with tempfile.TemporaryDirectory() as folder:
        _wide_tokenizer(options.vocab_size).save(str(Path(folder) / "tokenizer.json"))
        shapes = ((demo.path, demo.vocab_size, demo.eos_token_ids), (Path(folder), options.vocab_size, {_EOS}))
        costs = [
            asdict(
                asyncio.run(measure(GrammarCompiler(path, vocab_size, ends), vocab_size, ends, num_seqs, options.steps))
            )
            for path, vocab_size, ends in shapes
            for num_seqs in options.seqs
        ]
    json.dump(costs, sys.stdout, indent=2)
    print()


if __name__ == "__main__":
    main()
