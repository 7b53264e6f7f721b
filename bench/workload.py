"""What is asked of `tandem bench`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """One load of prompts and answers of fixed lengths. Either `rate_per_s` or `concurrency` is set."""

    rate_per_s: float | None = None
    concurrency: int | None = None
    num_requests: int
    num_warmup: int
    prompt_tokens: int
    output_tokens: int

    @property
    def arguments(self) -> tuple[str, ...]:
        """Options of `tandem bench`."""
        loop = ("--rate", self.rate_per_s) if self.concurrency is None else ("--concurrency", self.concurrency)
        numbers = ("--requests", self.num_requests, "--warmup", self.num_warmup)
        lengths = ("--prompt-tokens", self.prompt_tokens, "--output-tokens", self.output_tokens)
        return tuple(str(each) for each in (*loop, *numbers, *lengths))
