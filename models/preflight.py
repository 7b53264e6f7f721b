"""What this version can serve, decided before any weight is read: asked by routers, workers and `tandem doctor`.

Needs no torch and no weights, so that a router alone refuses what no worker could load. Refusals say what to do.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from models.config import load_model_config, read_config
from models.config_json import ConfigJson
from models.family import FAMILIES as NATIVE_FAMILIES
from models.files.checkpoint import CheckpointInfo, read_checkpoint, resolve_model
from models.files.gguf import find_gguf
from models.files.language_part import CONTAINERS, TEXT_CONFIG
from models.quantization.methods import METHODS, REMEDY, SECTIONS
from models.transformers_config import check_transformers_config
from models.transformers_families import FAMILIES
from tandem.errors import CheckpointError, ConfigError

AUTO = "auto"
"""The implementation that serves a family best."""
NATIVE, TRANSFORMERS = "native", "transformers"
"""Implementations: our own decoder, and transformers' with our attention and linear maps."""


@dataclass(frozen=True, slots=True)
class Servable:
    """A checkpoint that some worker of this version can load, if its weights are whole."""

    checkpoint: CheckpointInfo
    implementation: str
    """Name of the implementation that computes the model."""
    quantization: str | None
    """`quant_method`, or `gguf`; None = plain."""


def read_servable(model: str, implementation: str = AUTO) -> Servable:
    """Judges the folder or file that `--model` names, for `--model-impl`.

    Raises CheckpointError with the file, the key and the remedy, ConfigError if the implementation does not have it.
    """
    chosen, quantization = check_loadable(resolve_model(model), implementation)
    return Servable(read_checkpoint(model), chosen, quantization)


def check_loadable(path: Path, implementation: str = AUTO) -> tuple[str, str | None]:
    """Whose code computes the folder or GGUF file `path`, and `Servable.quantization`. A loader asks first.

    Raises CheckpointError, ConfigError, as `read_servable` does.
    """
    config = read_config(path)
    chosen = _implementation(config, implementation)
    quantization = _quantization(path, config)
    if chosen == NATIVE:
        load_model_config(path)
    elif quantization is not None:
        raise CheckpointError(
            f"{path}: {quantization}: quantised checkpoints are read for native families only: {REMEDY}"
        )
    else:
        check_transformers_config(config)
    return chosen, quantization


def _implementation(config: ConfigJson, wanted: str) -> str:
    family = config.text("model_type")
    having = [NATIVE] if family in NATIVE_FAMILIES else []
    if family in FAMILIES and not config.is_language_part:
        having.append(TRANSFORMERS)
    if not having:
        raise config.error("model_type", _unknown(family, config))
    if wanted not in (AUTO, *having):
        raise ConfigError("--model-impl", f"{wanted} does not have {family}: say auto or {having[0]}")
    return having[0] if wanted == AUTO else wanted


def _unknown(family: str, config: ConfigJson) -> str:
    served = f"; served are {', '.join(sorted(FAMILIES | NATIVE_FAMILIES.keys()))}"
    if config.has("auto_map"):
        return f"{family!r} brings code of its own, which is never run: take a model of a family that is served{served}"
    if config.is_language_part:
        served = f": take one of {', '.join(sorted(NATIVE_FAMILIES))}, or a text-only checkpoint"
        return f"{family!r} is not served as the language part of a model that takes images{served}"
    if config.has(TEXT_CONFIG):
        wanted = f"take a text-only one, or one whose language part is served ({', '.join(CONTAINERS)})"
        return f"{family!r} is more than a text model: {wanted}{served}"
    return f"{family!r} is not served: take a model of a family that is{served}"


def _quantization(path: Path, config: ConfigJson) -> str | None:
    if find_gguf(path) is not None:
        return "gguf"
    key = next((key for key in SECTIONS if config.has(key)), None)
    if key is None:
        return None
    section = config.section(key)
    method = section.text("quant_method", "")
    if method not in METHODS:
        raise section.error("quant_method", f"{method!r} is not read ({', '.join(METHODS)}): {REMEDY}")
    return method
