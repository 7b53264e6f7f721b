"""Which safetensors files make up a checkpoint, sharded or not. Needs no torch.

`model.safetensors` alone, or `model.safetensors.index.json` and the shards that it names.
Other formats can run code when loaded and are not read.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from models.config_json import ConfigJson
from tandem.errors import CheckpointError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_MAX_HEADER_BYTES = 100_000_000
"""The format's own limit."""
_OTHER_FORMATS = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.msgpack", "*.h5")


@dataclass(frozen=True, slots=True)
class WeightFiles:
    """Files in order of name; `weight_map` says which holds each tensor, if there is an index."""

    paths: tuple[Path, ...]
    weight_map: Mapping[str, str] | None


def find_weight_files(folder: Path) -> WeightFiles:
    """Finds the files of `folder`. Raises CheckpointError naming what is missing or misnamed."""
    single, index = folder / SINGLE_FILE, folder / INDEX_FILE
    if single.is_file():
        _check_whole(single)
        return WeightFiles((single,), None)
    if not index.is_file():
        raise CheckpointError(f"{single}: file is missing, and there is no {INDEX_FILE}; {_remedy(folder)}")
    config = ConfigJson.read(index)
    weight_map = config.text_map("weight_map")
    if not weight_map:
        raise config.error("weight_map", "is missing or empty")
    for name in sorted(set(weight_map.values())):
        if Path(name).name != name:
            raise config.error("weight_map", f"{name!r} is not a file of this folder")
        if not (folder / name).is_file():
            raise CheckpointError(f"{folder / name}: file is missing, {INDEX_FILE} names it: download it too")
        _check_whole(folder / name)
    return WeightFiles(tuple(folder / name for name in sorted(set(weight_map.values()))), weight_map)


def _check_whole(file: Path) -> None:
    """Compares the file's length with what its header says. Raises CheckpointError if they differ."""
    try:
        with file.open("rb") as opened:
            (length,) = struct.unpack("<Q", opened.read(8))
            if length > _MAX_HEADER_BYTES:
                raise ValueError("its header is not one of safetensors")
            header = json.loads(opened.read(length))
        ends = [each["data_offsets"][1] for name, each in header.items() if name != "__metadata__"]
        missing = 8 + length + max(ends, default=0) - file.stat().st_size
    except (OSError, ValueError, struct.error, KeyError, TypeError, AttributeError, IndexError) as error:
        raise CheckpointError(f"{file}: is no readable safetensors file: {error}: download it again") from error
    if missing > 0:
        raise CheckpointError(
            f"{file}: is no readable safetensors file: it ends {missing} bytes too early: download it again"
        )


def _remedy(folder: Path) -> str:
    """What to do where there are no safetensors."""
    other = next((file.name for pattern in _OTHER_FORMATS for file in sorted(folder.glob(pattern))), None)
    if other is None:
        return "only safetensors are loaded: download the weights too"
    return (
        f"{other} could run code when it is loaded, only safetensors are: write them once with transformers, by "
        "`from_pretrained` and `save_pretrained`, where you trust the file"
    )
