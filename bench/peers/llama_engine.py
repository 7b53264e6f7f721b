"""llama.cpp under `bench.peers`: run by its own environment's python, as a file, on a GGUF of the same weights.

Through llama-cpp-python's bindings of the C functions. A job gets a context of its own shape: one stream of KV for
each seq, which llama.cpp decodes faster than one that all share; flash attention, float16 KV, batches of its default
sizes. Greedy tokens are the largest logits by numpy, which is faster than its own sampler.
"""

from __future__ import annotations

import importlib
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

sys.path.append(str(Path(__file__).parents[2]))
from bench.peers.job import Job, JobTimes, OpenedEngine, serve_jobs

sys.path.pop()  # or Tandem's packages would answer to names that a peer looks for

_BATCH_TOKENS = 2048
_MICRO_BATCH_TOKENS = 512
_STREAM_MULTIPLE = 256
"""Cells of a stream are rounded up to it."""
_FLASH_ATTENTION = 1
_AMX = "AMX_INT8"


class LlamaEngine:
    """One model, and a context for each job."""

    def __init__(self, path: Path, threads: int) -> None:
        """Raises RuntimeError if llama.cpp cannot read the file."""
        self._llama: Any = importlib.import_module("llama_cpp")  # not in the environment that checks types
        self._threads = threads
        self._llama.llama_backend_init()
        params = self._llama.llama_model_default_params()
        if _AMX in self._features:
            # Quantised weights in a form for AMX end the process: an illegal instruction, with llama-cpp-python 0.3.36.
            params.use_extra_bufts = False
        self._model = self._llama.llama_model_load_from_file(str(path).encode(), params)
        if not self._model:
            raise RuntimeError(f"llama.cpp cannot read {path}")
        self._vocab_size: int = self._llama.llama_vocab_n_tokens(self._llama.llama_model_get_vocab(self._model))

    @property
    def facts(self) -> dict[str, str]:
        """Version, size of the weights, instructions that it was built for."""
        return {
            "llama-cpp-python": self._llama.__version__,
            "threads": str(self._threads),
            "weights_mb": f"{self._llama.llama_model_size(self._model) / 1e6:.0f}",
            "features": " ".join(self._features),
            **({"weights in forms of their own": "no, on AMX"} if _AMX in self._features else {}),
        }

    @property
    def _features(self) -> list[str]:
        """What it was built for, such as AVX512."""
        info = self._llama.llama_print_system_info().decode()
        return [part.split(" = ")[0].split(":")[-1].strip() for part in info.split("|") if "= 1" in part]

    def run(self, job: Job) -> JobTimes:
        """Raises RuntimeError if llama.cpp fails."""
        prompts = np.array(job.prompts(self._vocab_size), dtype=np.int32)  # [B, T]
        context = self._open_context(job)
        batch = _Batch(self._llama, max(_BATCH_TOKENS, job.num_seqs))
        try:
            began_s = time.perf_counter()
            tokens = self._prefill(context, batch, prompts)
            prefill_s = time.perf_counter() - began_s
            first_tokens: list[int] = tokens.tolist()
            step_s: list[float] = []
            seqs = np.arange(job.num_seqs)
            for step in range(job.decode_steps):
                began_s = time.perf_counter()
                batch.fill(tokens, np.full(job.num_seqs, job.prompt_tokens + step), seqs, seqs)
                tokens = self._decode(context, batch, job.num_seqs)
                step_s.append(time.perf_counter() - began_s)
        finally:
            batch.free()
            self._llama.llama_free(context)
        return JobTimes(prefill_s, step_s, first_tokens)

    def _open_context(self, job: Job) -> Any:
        params = self._llama.llama_context_default_params()
        stream = -(-(job.prompt_tokens + job.decode_steps + 1) // _STREAM_MULTIPLE) * _STREAM_MULTIPLE
        params.n_ctx = job.num_seqs * stream
        params.n_seq_max = job.num_seqs
        params.n_batch, params.n_ubatch = max(_BATCH_TOKENS, job.num_seqs), _MICRO_BATCH_TOKENS
        params.n_threads = params.n_threads_batch = self._threads
        params.flash_attn_type = _FLASH_ATTENTION
        params.kv_unified = False
        context = self._llama.llama_init_from_model(self._model, params)
        if not context:
            raise RuntimeError(f"llama.cpp has no context of {job.num_seqs} × {stream}")
        return context

    def _prefill(self, context: Any, batch: _Batch, prompts: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """The first token of each of `prompts` `[B, T]`, in batches of all seqs' tokens one after the other."""
        num_seqs, num_tokens = prompts.shape
        flat = prompts.reshape(-1)
        positions = np.tile(np.arange(num_tokens), num_seqs)
        seqs = np.repeat(np.arange(num_seqs), num_tokens)
        firsts: list[np.ndarray[Any, Any]] = []
        for begin in range(0, len(flat), _BATCH_TOKENS):
            part = slice(begin, begin + _BATCH_TOKENS)
            lasts = np.flatnonzero(positions[part] == num_tokens - 1)
            batch.fill(flat[part], positions[part], seqs[part], lasts)
            firsts.append(self._decode(context, batch, len(lasts)))
        return np.concatenate(firsts)

    def _decode(self, context: Any, batch: _Batch, num_outputs: int) -> np.ndarray[Any, Any]:
        """The largest logit's id of each token that asked for it."""
        if code := self._llama.llama_decode(context, batch.raw):
            raise RuntimeError(f"llama_decode returned {code}")
        if not num_outputs:
            self._llama.llama_synchronize(context)
            return np.empty(0, np.int64)
        logits = np.ctypeslib.as_array(self._llama.llama_get_logits(context), (num_outputs, self._vocab_size))
        tokens: np.ndarray[Any, Any] = logits.argmax(axis=1)
        return tokens


class _Batch:
    """A `llama_batch` whose columns are written as arrays."""

    def __init__(self, llama: Any, capacity: int) -> None:
        self._llama = llama
        self.raw = llama.llama_batch_init(capacity, 0, 1)
        as_array = np.ctypeslib.as_array
        self._tokens = as_array(self.raw.token, (capacity,))
        self._positions = as_array(self.raw.pos, (capacity,))
        self._wanted = as_array(self.raw.logits, (capacity,))
        as_array(self.raw.n_seq_id, (capacity,))[:] = 1

    def fill(
        self,
        tokens: np.ndarray[Any, Any],
        positions: np.ndarray[Any, Any],
        seqs: np.ndarray[Any, Any],
        wanted: np.ndarray[Any, Any],
    ) -> None:
        """`tokens`, `positions`, `seqs` `[T]`; `wanted`: indices of those whose logits are asked for."""
        count = self.raw.n_tokens = len(tokens)
        self._tokens[:count] = tokens
        self._positions[:count] = positions
        self._wanted[:count] = 0
        self._wanted[wanted] = 1
        for index, seq in enumerate(seqs.tolist()):
            self.raw.seq_id[index][0] = seq

    def free(self) -> None:
        """Gives the C arrays back."""
        self._llama.llama_batch_free(self.raw)


def open_engine(model: Path, threads: int, file_type: str) -> OpenedEngine:
    """`<file_type>.gguf` in the folder of the checkpoint, as `bench.peers.gguf_files` writes it."""
    engine = LlamaEngine(model / f"{file_type}.gguf", threads)
    return OpenedEngine(engine.run, engine.facts)


if __name__ == "__main__":
    serve_jobs(open_engine)
