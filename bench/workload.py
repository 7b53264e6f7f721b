"""What is asked of `tandem bench`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """One load of prompts and greedy answers, of fixed lengths. Either `rate_per_s` or `concurrency` is set."""

    rate_per_s: float | None = None
    concurrency: int | None = None
    num_requests: int
    num_warmup: int
    prompt_tokens: int
    output_tokens: int

    @property
    def name(self) -> str:
        """For tables."""
        return f"{self.concurrency} × ({self.prompt_tokens} + {self.output_tokens})"

    @property
    def arguments(self) -> tuple[str, ...]:
        """Options of `tandem bench`."""
        loop = ("--rate", self.rate_per_s) if self.concurrency is None else ("--concurrency", self.concurrency)
        numbers = ("--requests", self.num_requests, "--warmup", self.num_warmup)
        lengths = ("--prompt-tokens", self.prompt_tokens, "--output-tokens", self.output_tokens)
        return tuple(str(each) for each in (*loop, *numbers, *lengths, "--temperature", 0))


def closed_loop(callers: int, prompt_tokens: int, output_tokens: int) -> LoadOptions:
    """Returns a load of callers who each send three requests, the next one once one has ended."""
    return LoadOptions(
        concurrency=callers,
        num_requests=3 * callers,
        num_warmup=2,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
    )


GPU_LOADS = (closed_loop(32, 1024, 128), closed_loop(128, 1024, 128), closed_loop(64, 256, 256))
"""Of an 8B model, with which vLLM is compared on one GPU."""
SMOKE_LOADS = (closed_loop(4, 64, 16),)
"""Of the shape `smoke`: it only shows quickly that everything runs."""


def loads_of(shape: str) -> tuple[LoadOptions, ...]:
    """Returns the loads for a model of that shape."""
    return SMOKE_LOADS if shape == "smoke" else GPU_LOADS
