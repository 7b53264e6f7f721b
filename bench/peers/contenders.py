"""Who is compared: each engine under its name in the tables, with its options and where it runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

OURS = "tandem"
OURS_INT8 = "tandem int8"
OURS_INT4 = "tandem int4"
OURS_INT8_KV = "tandem int8 KV"
VLLM = "vllm"
LLAMA = "llama.cpp"
LLAMA_Q8_0 = "llama.cpp Q8_0"
LLAMA_Q4_0 = "llama.cpp Q4_0"
LLAMA_Q4_K = "llama.cpp Q4_K_M"
TRANSFORMERS = "transformers"

_OUR_BUDGETS = (512, 2048)
_VLLM_BUDGETS = (4096, 16384)


@dataclass(frozen=True, slots=True)
class Contender:
    """One column of the tables."""

    name: str
    program: str
    """`bench.peers.<program>_engine` is its process."""
    budgets: tuple[int | None, ...] = (None,)
    """Most prompt tokens of a step: the engine's default first (ours beside sequences that decode), then a larger.

    None = the engine's own business.
    """
    options: Mapping[str, str] = field(default_factory=dict)
    """Keyword arguments of its `open_engine`."""


CONTENDERS: Mapping[str, Contender] = {
    each.name: each
    for each in (
        Contender(OURS, "tandem", _OUR_BUDGETS),
        Contender(VLLM, "vllm", _VLLM_BUDGETS),  # its default is that of its in-process class
        Contender(LLAMA, "llama", options={"file_type": "BF16"}),
        Contender(TRANSFORMERS, "transformers"),
        Contender(OURS_INT8, "tandem", _OUR_BUDGETS, {"quantize": "int8"}),
        Contender(OURS_INT4, "tandem", _OUR_BUDGETS, {"quantize": "int4"}),
        Contender(OURS_INT8_KV, "tandem", _OUR_BUDGETS, {"kv_dtype": "int8"}),
        Contender(LLAMA_Q8_0, "llama", options={"file_type": "Q8_0"}),
        Contender(LLAMA_Q4_0, "llama", options={"file_type": "Q4_0"}),
        Contender(LLAMA_Q4_K, "llama", options={"file_type": "Q4_K_M"}),
    )
}
"""By name."""
PLAIN = (OURS, VLLM, LLAMA, TRANSFORMERS)
"""All on the same bfloat16 weights."""
QUANTIZED = (OURS, OURS_INT8, OURS_INT4, OURS_INT8_KV, LLAMA_Q8_0, LLAMA_Q4_0, LLAMA_Q4_K)
"""Ours as it is among them, so that ratios are of one run."""


@dataclass(frozen=True, slots=True)
class Environments:
    """Where the peers are installed, as `make peers-venv` does; None = nowhere."""

    vllm_python: Path | None = None
    llama_python: Path | None = None

    def absent(self) -> dict[str, str]:
        """Why a contender cannot be measured, by its name."""
        missing = {"vllm": self.vllm_python is None, "llama": self.llama_python is None}
        return {
            name: f"no environment of {contender.program} given"
            for name, contender in CONTENDERS.items()
            if missing.get(contender.program, False)
        }
