"""Which safetensors files make up a checkpoint, sharded or not. Needs no torch.

`model.safetensors` alone, or `model.safetensors.index.json` and the shards that it names.
Other formats can run code when loaded and are not read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from models.config_json import ConfigJson
from tandem.errors import CheckpointError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True)
class WeightFiles:
    """Files in order of name; `weight_map` says which holds each tensor, if there is an index."""

    paths: tuple[Path, ...]
    weight_map: Mapping[str, str] | None


def find_weight_files(folder: Path) -> WeightFiles:
    """Finds the files of `folder`. Raises CheckpointError naming what is missing or misnamed."""
    single, index = folder / SINGLE_FILE, folder / INDEX_FILE
    if single.is_file():
        return WeightFiles((single,), None)
    if not index.is_file():
        raise CheckpointError(f"{single}: file is missing, and there is no {INDEX_FILE}; only safetensors are loaded")
    config = ConfigJson.read(index)
    weight_map = config.text_map("weight_map")
    if not weight_map:
        raise config.error("weight_map", "is missing or empty")
    for name in sorted(set(weight_map.values())):
        if Path(name).name != name:
            raise config.error("weight_map", f"{name!r} is not a file of this folder")
        if not (folder / name).is_file():
            raise CheckpointError(f"{folder / name}: file is missing, {INDEX_FILE} names it")
    return WeightFiles(tuple(folder / name for name in sorted(set(weight_map.values()))), weight_map)
