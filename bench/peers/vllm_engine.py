"""vLLM's engine under `bench.peers`: run by its own environment's python, as a file.

The engine runs in this process (no engine core process between), steps are called one by one. The
scheduler's token budget is set per job, so that one engine serves all of them. Prefill is timed with
one new token per seq, so that no decode mixes into its chunks; the decode steps that count are
those in which every seq gets a token after its first. They come from a second pass over the same
prompts, which the prefix cache makes short.
"""

from __future__ import annotations

import importlib
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[2]))
from bench.peers.job import Job, JobTimes, OpenedEngine, peer_dtype, serve_jobs

sys.path.pop()  # or Tandem's packages would answer to names that a peer looks for

_MOST_BATCHED_TOKENS = 16384
_CONTEXT_TOKENS = 4096


class VllmEngine:
    """One LLMEngine and its scheduler."""

    def __init__(self, model: Path) -> None:
        vllm: Any = importlib.import_module("vllm")  # not in the environment that checks types
        sampling: Any = importlib.import_module("vllm.sampling_params")
        self.version: str = vllm.__version__
        self.dtype = peer_dtype(importlib.import_module("torch").backends.cpu.get_cpu_capability())
        self._engine: Any = vllm.LLMEngine.from_engine_args(
            vllm.EngineArgs(
                model=str(model),
                dtype=self.dtype,
                skip_tokenizer_init=True,
                max_model_len=_CONTEXT_TOKENS,
                max_num_batched_tokens=_MOST_BATCHED_TOKENS,
                disable_log_stats=True,
            )
        )
        self._scheduler: Any = self._engine.engine_core.engine_core.scheduler
        self._vocab_size: int = self._engine.model_config.get_vocab_size()
        self._sampling: Callable[[int], Any] = lambda max_tokens: sampling.SamplingParams(
            temperature=0.0,
            max_tokens=max_tokens,
            ignore_eos=True,
            detokenize=False,
            output_kind=sampling.RequestOutputKind.DELTA,
        )
        self._num_requests = 0

    def run(self, job: Job) -> JobTimes:
        """Both passes."""
        prompts = job.prompts(self._vocab_size)
        self._scheduler.max_num_scheduled_tokens = min(job.budget_tokens or _MOST_BATCHED_TOKENS, _MOST_BATCHED_TOKENS)
        ids = self._add(prompts, 1)
        first_tokens: dict[str, int] = {}
        began_s = time.perf_counter()
        while self._engine.has_unfinished_requests():
            first_tokens |= {name: tokens[0] for name, tokens in self._step().items()}
        prefill_s = time.perf_counter() - began_s
        steps_s = self._decode(prompts, job.decode_steps) if job.decode_steps else []
        return JobTimes(prefill_s, steps_s, [first_tokens[name] for name in ids])

    def _decode(self, prompts: list[list[int]], decode_steps: int) -> list[float]:
        """Seconds of each pure decode step."""
        self._add(prompts, decode_steps + 1)
        started: set[str] = set()
        steps_s = []
        while self._engine.has_unfinished_requests():
            all_started = len(started) == len(prompts)
            began_s = time.perf_counter()
            tokens = self._step()
            took_s = time.perf_counter() - began_s
            if all_started and len(tokens) == len(prompts):
                steps_s.append(took_s)
            started |= tokens.keys()
        return steps_s

    def _add(self, prompts: list[list[int]], max_tokens: int) -> list[str]:
        """Queues them; returns their ids."""
        ids = [str(self._num_requests + index) for index in range(len(prompts))]
        self._num_requests += len(prompts)
        for name, prompt in zip(ids, prompts, strict=True):
            self._engine.add_request(name, {"prompt_token_ids": prompt}, self._sampling(max_tokens))
        return ids

    def _step(self) -> dict[str, list[int]]:
        """New tokens of each request that got any."""
        outputs = self._engine.step()
        return {each.request_id: list(each.outputs[0].token_ids) for each in outputs if each.outputs[0].token_ids}


def open_engine(model: Path, threads: int) -> OpenedEngine:
    """The parent has set threads and their cores by the environment, as vLLM wants it."""
    found = type(importlib.import_module("vllm.platforms").current_platform).__name__
    engine = VllmEngine(model)
    facts = {
        "vllm": engine.version,
        "threads": str(threads),
        "dtype": engine.dtype,
        "platform": found,
        "preloaded": " ".join(Path(each).name for each in os.environ.get("LD_PRELOAD", "").split(":") if each),
    }
    return OpenedEngine(engine.run, facts)


if __name__ == "__main__":
    serve_jobs(open_engine)
