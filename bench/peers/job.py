"""What `bench.peers` asks of an engine's process and what it answers: JSON lines. Standard library only.

Every engine runs in a process of its own that loads the model once and then does one job at a
time, so that engines can take turns within one run. The process of a peer runs in the peer's own
environment and imports nothing of Tandem but this file.
"""

from __future__ import annotations

import json
import os
import random
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

_FIRST_TOKEN_ID = 4


def peer_dtype(capability: str) -> str:
    """In what engines that multiply by torch load the checkpoint. `capability`: torch's name of this CPU's vectors.

    On AVX2 torch multiplies bfloat16 element by element: 5 GFLOP/s where float32 makes 100 and more.
    """
    return "float32" if capability == "AVX2" else "bfloat16"


@dataclass(frozen=True, slots=True)
class Job:
    """Compute all prompts, then decode all seqs together, greedily."""

    num_seqs: int
    prompt_tokens: int
    decode_steps: int
    """Steps to time once every prompt is computed."""
    budget_tokens: int | None
    """Most prompt tokens of one step; None = all at once, for an engine that knows no budget."""
    seed: int

    def prompts(self, vocab_size: int) -> list[list[int]]:
        """Random ids: the same for every engine, and others with every seed, so that no cache knows them."""
        rng = random.Random(self.seed)
        return [
            [rng.randrange(_FIRST_TOKEN_ID, vocab_size) for _ in range(self.prompt_tokens)]
            for _ in range(self.num_seqs)
        ]


@dataclass(frozen=True, slots=True)
class JobTimes:
    """What one job took."""

    prefill_s: float
    """From the first step to the last prompt's first token."""
    step_s: list[float]
    """Each pure decode step of all seqs."""
    first_tokens: list[int]
    """The first greedy token of each seq: shows that engines compute the same model."""


@dataclass(frozen=True, slots=True)
class OpenedEngine:
    """An engine ready for jobs."""

    run: Callable[[Job], JobTimes]
    facts: dict[str, str]
    """Versions and settings, to be recorded."""


def serve_jobs(open_engine: Callable[..., OpenedEngine]) -> None:
    """The main of an engine's process, called as `… MODEL_DIR THREADS [OPTIONS]`: jobs on stdin, answers on stdout.

    `open_engine(model, threads, **options)`; OPTIONS are JSON. Ends with its input. Whatever else writes to stdout is
    sent to stderr.
    """
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)
        model, threads, *options = sys.argv[1:]
        engine = open_engine(Path(model), int(threads), **json.loads(options[0] if options else "{}"))
        _answer(answers, engine.facts)
        for line in sys.stdin:
            _answer(answers, asdict(engine.run(Job(**json.loads(line)))))


def _answer(stream: Any, document: dict[str, Any]) -> None:
    stream.write(json.dumps(document) + "\n")
    stream.flush()
