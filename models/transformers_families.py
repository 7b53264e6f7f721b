"""The decoder families that transformers runs with our parts. Needs no torch: routers read it too."""

from __future__ import annotations

FAMILIES = frozenset(
    (
        *("llama", "mistral", "ministral", "qwen2", "qwen3"),
        *(
            "gemma",
            "gemma2",
            "gemma3_text",
            "phi",
            "phi3",
            "olmo",
            "olmo2",
            "olmo3",
            "granite",
            "smollm3",
            "glm",
            "glm4",
        ),
        *("starcoder2", "stablelm", "cohere", "cohere2", "nemotron", "helium", "seed_oss", "arcee", "ernie4_5"),
        *("hunyuan_v1_dense", "gpt_neox", "exaone4", "apertus"),
        *("mixtral", "qwen2_moe", "qwen3_moe", "glm4_moe", "granitemoe", "olmoe", "phimoe", "ernie4_5_moe"),
    )
)
"""By `model_type`; each has its test of exactness."""

MIXED_WINDOWS = frozenset(
    (
        *("cohere2", "exaone4", "gemma2", "gemma3_text", "ministral", "mistral"),
        *("olmo3", "qwen2", "qwen2_moe", "qwen3", "smollm3"),
    )
)
"""Families in which some layers may have a window and other layers none."""
WINDOWED = MIXED_WINDOWS | {"mixtral", "phi3", "phimoe", "qwen3_moe", "starcoder2"}
"""Families that compute windows at all; with other families transformers would cut its cache, and not its mask."""
