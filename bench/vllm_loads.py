"""vLLM's engine under the loads of `bench.served`, as JSON with the same keys: `python -m bench.vllm_loads`.

Runs where `vllm` imports. Its engine core is a process of its own; tokens go in and out, without HTTP and tokenizer;
weights are random. Options are vLLM's own, but for a batch as large as Tandem's.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from itertools import pairwise
from typing import Any

from bench.support.checkpoints import CONTEXT_TOKENS, PEER_SHAPES
from bench.workload import LoadOptions, loads_of
from engine.memory import MANY_SEQS
from simulator.outcomes import percentiles

_LEAST_TOKEN = 16
"""Ids below may be special tokens."""


def engine_of(shape: str, folder: str) -> Any:
    """Returns an engine with random weights of the shape, whose config is written to `folder`."""
    vllm: Any = importlib.import_module("vllm")  # not in the environment that checks types
    config = PEER_SHAPES[shape].config()
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(folder)
    options = vllm.EngineArgs(
        model=folder,
        dtype="bfloat16",
        load_format="dummy",
        skip_tokenizer_init=True,
        max_model_len=CONTEXT_TOKENS,
        max_num_seqs=MANY_SEQS,
        enable_prefix_caching=False,
    )
    return vllm.LLMEngine.from_engine_args(options)


def run_load(engine: Any, load: LoadOptions, vocab_size: int) -> dict[str, Any]:
    """Returns what `tandem bench` tells of a load, as far as pages show it."""
    sampling_params = importlib.import_module("vllm").SamplingParams
    sampling = sampling_params(max_tokens=load.output_tokens, temperature=0.0, ignore_eos=True, detokenize=False)
    rng = random.Random(0)
    sent_s: dict[str, float] = {}
    times_s: dict[str, list[float]] = {}  # of each token

    def send() -> None:
        name, tokens = str(len(sent_s)), rng.choices(range(_LEAST_TOKEN, vocab_size), k=load.prompt_tokens)
        sent_s[name], times_s[name] = time.perf_counter(), []
        engine.add_request(name, {"prompt_token_ids": tokens}, sampling)

    began_s = time.perf_counter()
    for _ in range(load.concurrency or 1):
        send()
    num_left = load.num_requests
    while num_left:
        for output in engine.step():
            known = times_s[output.request_id]
            known += [time.perf_counter()] * (len(output.outputs[0].token_ids) - len(known))
            if output.finished:
                num_left -= 1
                if len(sent_s) < load.num_requests:
                    send()
    seconds = time.perf_counter() - began_s
    first = [each[0] - sent_s[name] for name, each in times_s.items()]
    gaps = [after - before for each in times_s.values() for before, after in pairwise(each)]
    return {
        "options": asdict(load),
        "rates_per_s": {"output_tokens": load.num_requests * load.output_tokens / seconds},
        "latencies_s": {"ttft": percentiles(first), "itl": percentiles(gaps)},
    }


def main(arguments: Sequence[str]) -> int:
    """Prints version and figures; the first load runs once more before, uncounted."""
    parser = argparse.ArgumentParser(prog="python -m bench.vllm_loads", description=__doc__)
    parser.add_argument("--shape", default="8b", choices=PEER_SHAPES)
    shape = parser.parse_args(arguments).shape
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    told = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # all processes of vLLM log to standard output
    loads, vocab_size = loads_of(shape), PEER_SHAPES[shape].sizes["vocab_size"]
    with tempfile.TemporaryDirectory() as folder:
        engine = engine_of(shape, folder)
        run_load(engine, loads[0], vocab_size)
        figures = [run_load(engine, load, vocab_size) for load in loads]
    with told:
        json.dump({"vllm": importlib.import_module("vllm").__version__, "loads": figures}, told)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
