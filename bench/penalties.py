"""What penalties cost a step besides its forward pass: `python -m bench.penalties`.

Draws a token from each row of ready logits, greedily, planned and drawn as a step does; with penalties and without.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Sequence

import torch

from engine.draws import Draws, SampleSpec
from engine.history import TokenHistory, distinct
from engine.sampler import draw, plan_draws
from kernels.operations import Kernels
from kernels.reference import ReferenceBackend
from kernels.reference_operations import ReferenceOperations
from tandem.types import SamplingParams, TokenId

_VOCAB_SIZE = 151_936
_NUM_OUTPUT_TOKENS = 500
_PLAIN = SamplingParams(max_tokens=1000, temperature=0.0)
_PENALISED = SamplingParams(
    max_tokens=1000, temperature=0.0, repetition_penalty=1.2, presence_penalty=0.5, frequency_penalty=0.1
)


def step_ms(specs: Sequence[SampleSpec], device: torch.device, repeats: int) -> tuple[float, float]:
    """Median milliseconds to plan one step's draws, and to make them."""
    kernels = Kernels(ReferenceBackend(), ReferenceOperations())
    logits = torch.randn(len(specs), _VOCAB_SIZE, device=device)
    planned_ms, drawn_ms = [], []
    for _ in range(repeats):
        began_s = time.perf_counter()
        plan = plan_draws(Draws.of(specs), kernels, device)
        planned_s = time.perf_counter()
        draw(logits, plan).read()
        planned_ms.append((planned_s - began_s) * 1e3)
        drawn_ms.append((time.perf_counter() - planned_s) * 1e3)
    return statistics.median(planned_ms), statistics.median(drawn_ms)


def main() -> None:
    """Prints a row for each batch and length of prompt."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--repeats", type=int, default=9)
    options = parser.parse_args()
    rng, device = random.Random(0), torch.device(options.device)
    print("rows  prompt tokens  plan ms  draw ms  draw ms without penalties")
    for num_rows, num_prompt_tokens in ((1, 1024), (1, 131_072), (64, 1024), (64, 16_384)):
        specs = []
        for _ in range(num_rows):
            prompt = [TokenId(rng.randrange(_VOCAB_SIZE)) for _ in range(num_prompt_tokens)]
            output = [TokenId(rng.randrange(_VOCAB_SIZE)) for _ in range(_NUM_OUTPUT_TOKENS)]
            history = TokenHistory(distinct(prompt), output)
            specs.append(SampleSpec(_PENALISED, len(output), history))
        plain = [SampleSpec(_PLAIN, each.output_index) for each in specs]
        (plan_ms, draw_ms), (_, plain_ms) = (step_ms(each, device, options.repeats) for each in (specs, plain))
        print(f"{num_rows:4}  {num_prompt_tokens:13}  {plan_ms:7.2f}  {draw_ms:7.2f}  {plain_ms:25.2f}")


if __name__ == "__main__":
    main()
