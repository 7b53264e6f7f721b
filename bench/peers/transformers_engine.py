"""transformers under `bench.peers`: `python -m bench.peers.transformers_engine DIR THREADS`; sdpa, static batches."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM

from bench.peers.job import Job, JobTimes, OpenedEngine, peer_dtype, serve_jobs


class TokenClock:
    """A stopping criterion that never stops: `generate` asks it after every token, and it notes when."""

    def __init__(self) -> None:
        self.at_s: list[float] = []

    def __call__(self, token_ids: torch.Tensor, scores: object, **_: object) -> torch.Tensor:
        """`token_ids` `[B, T]`; False for each seq."""
        self.at_s.append(time.perf_counter())
        return torch.zeros(token_ids.shape[0], dtype=torch.bool)


def open_engine(model: Path, threads: int) -> OpenedEngine:
    """Loads it in the dtype that torch multiplies fast here."""
    torch.set_num_threads(threads)
    dtype = peer_dtype(torch.backends.cpu.get_cpu_capability())
    loaded: Any = AutoModelForCausalLM.from_pretrained(model, dtype=dtype, attn_implementation="sdpa")

    def run(job: Job) -> JobTimes:
        prompts = torch.tensor(job.prompts(loaded.config.vocab_size))  # [B, T]
        clock = TokenClock()
        began_s = time.perf_counter()
        with torch.inference_mode():
            token_ids = loaded.generate(
                prompts,
                attention_mask=torch.ones_like(prompts),
                do_sample=False,
                max_new_tokens=job.decode_steps + 1,
                stopping_criteria=[clock],
            )
        steps_s = [later - earlier for earlier, later in zip(clock.at_s, clock.at_s[1:], strict=False)]
        return JobTimes(clock.at_s[0] - began_s, steps_s, token_ids[:, job.prompt_tokens].tolist())

    return OpenedEngine(run, {"transformers": transformers.__version__, "threads": str(threads), "dtype": dtype})


if __name__ == "__main__":
    serve_jobs(open_engine)
