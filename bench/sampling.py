"""What sampling parameters cost a step on the host: `python -m bench.sampling`.

Plans the draws of a step, draws from ready logits, and reads what was drawn, as a step does, for each kind of
parameter alone and for all of them in one batch. Microseconds per step, the fastest of many.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from bench.support.timing import time_s
from engine.history import TokenHistory, distinct
from engine.loading import keep_freed_memory
from engine.penalties import fixed_changes, has_fixed_changes, reads_output
from engine.sampler import draw, plan_draws
from engine.step import SampleSpec
from kernels.dispatch import select_kernels
from tandem.types import SamplingParams, TokenId

_NUM_PROMPT_TOKENS, _NUM_OUTPUT_TOKENS = 512, 200
_KINDS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "temperature": {"temperature": 0.8},
    "top-k, top-p, min-p": {"temperature": 0.8, "top_k": 50, "top_p": 0.9, "min_p": 0.01},
    "penalties": {"repetition_penalty": 1.1, "presence_penalty": 0.1, "frequency_penalty": 0.1},
    "logprobs 5": {"logprobs": 5},
    "logprobs 20": {"logprobs": 20},
    "bias of 100 ids": {"logit_bias": {TokenId(each): 1.0 for each in range(100)}},
    "min_tokens": {"min_tokens": 1000, "end_token_ids": frozenset({TokenId(1), TokenId(2)})},
}


def specs_of(params: Sequence[SamplingParams], vocab_size: int) -> list[SampleSpec]:
    """A draw in the middle of a completion for each."""
    rng = random.Random(0)
    specs = []
    for each in params:
        history = None
        if reads_output(each):
            prompt = [TokenId(rng.randrange(vocab_size)) for _ in range(_NUM_PROMPT_TOKENS)]
            output = [TokenId(rng.randrange(vocab_size)) for _ in range(_NUM_OUTPUT_TOKENS)]
            history = TokenHistory(distinct(prompt), output)
        fixed = fixed_changes(each) if has_fixed_changes(each) else None
        specs.append(SampleSpec(each, _NUM_OUTPUT_TOKENS, history, fixed=fixed))
    return specs


def params_of(kind: str, seed: int) -> SamplingParams:
    """Of one choice."""
    return SamplingParams(**{"max_tokens": 1000, "temperature": 0.0, "seed": seed, **_KINDS[kind]})


def print_row(kind: str, specs: Sequence[SampleSpec], vocab_size: int, device: torch.device) -> None:
    """Times one batch."""
    kernels = select_kernels("auto", device, torch.float32)
    logits = torch.randn(len(specs), vocab_size, device=device)
    plan = plan_draws(specs, kernels, device)
    drawn = draw(logits, plan).fetch(torch.Tensor.cpu)
    calls = (
        partial(plan_draws, specs, kernels, device),
        partial(draw, logits, plan),
        drawn.read,
    )
    plan_us, draw_us, read_us = (1e6 * time_s([call], torch.device("cpu")) for call in calls)
    print(f"{len(specs):5}  {kind:20}  {plan_us:8.0f}  {draw_us:9.0f}  {read_us:8.0f}", flush=True)


def main() -> None:
    """Prints a row for each size of batch and kind of parameter."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--vocabulary", type=int, default=4096, help="small, so that the host's part shows")
    options = parser.parse_args()
    device = torch.device(options.device)
    keep_freed_memory()  # as workers do
    torch.set_num_threads(1)
    print("draws  parameters             plan us    draw us   read us")
    for num_draws in (64, 256):
        mixed: list[SamplingParams] = []
        for kind in _KINDS:
            params = [params_of(kind, seed) for seed in range(num_draws)]
            mixed += params[:: len(_KINDS)]
            print_row(kind, specs_of(params, options.vocabulary), options.vocabulary, device)
        print_row("all of them, mixed", specs_of(mixed, options.vocabulary), options.vocabulary, device)


if __name__ == "__main__":
    main()
