"""What `--model` names, before anything in it is understood: refuses what cannot be a checkpoint, with the remedy.

Looks at names and at the first bytes of files alone.
"""

from __future__ import annotations

import re
from pathlib import Path

from models.files.gguf import SUFFIX
from models.files.hub import SCHEME
from tandem.errors import CheckpointError

_LFS = b"version https://git-lfs.github.com/spec/"
_LFS_MAX_BYTES = 1024
"""A pointer has about 130."""
_IN_LFS = ("*.safetensors", f"*{SUFFIX}", "*.json", "*.model")
"""Files that repositories keep in Git LFS."""
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
_OTHER_TOKENIZERS = ("tokenizer.model", "*.tiktoken", "vocab.json")


def check_model_path(model: str, path: Path) -> None:
    """`path` is where `model` leads. Raises CheckpointError that says what to do."""
    if not path.exists():
        raise CheckpointError(_missing(model, path))
    if not path.is_dir():
        if path.suffix != SUFFIX:
            raise CheckpointError(
                f"{path}: a file, and none that ends in {SUFFIX}: name the folder that holds config.json"
            )
        _check_not_pointer(path)
        return
    if (path / "config.json").exists() or any(path.glob(f"*{SUFFIX}")):
        for pattern in _IN_LFS:
            for file in sorted(path.glob(pattern)):
                _check_not_pointer(file)
        return
    if (path / "adapter_config.json").exists():
        raise CheckpointError(
            f"{path}: a LoRA adapter, not a model: merge it into its base model, with `merge_and_unload` and "
            "`save_pretrained` of the package peft, and name the folder that this writes"
        )
    if snapshots := sorted((path / "snapshots").glob("*/config.json")):
        raise CheckpointError(f"{path}: the cache of a model hub: name the folder {snapshots[0].parent}")
    below = sorted(path.glob("*/config.json"))
    hint = f"; there is one in {below[0].parent}: name that folder" if below else ": download the whole model"
    raise CheckpointError(f"{path}: holds no config.json and no {SUFFIX} file{hint}")


def missing_tokenizer(folder: Path) -> str:
    """What to say of a folder without tokenizer.json."""
    file = folder / "tokenizer.json"
    other = next((found.name for name in _OTHER_TOKENIZERS for found in folder.glob(name)), None)
    if other is not None:
        return (
            f"{file}: no such file, and {other} is not read: make it once, where transformers is installed: "
            f"python -c \"from transformers import AutoTokenizer as T; T.from_pretrained('{folder}')"
            f".save_pretrained('{folder}')\""
        )
    return f"{file}: no such file: download it with the rest of the model"


def _missing(model: str, path: Path) -> str:
    if _HUB_NAME.fullmatch(model) and not path.parent.exists():
        return f"{model}: no such folder: to fetch it from the hub, say --model {SCHEME}{model}"
    taken = f"a folder with config.json, a {SUFFIX} file, {SCHEME}OWNER/NAME, or `demo`"
    return f"{path}: no such folder: --model takes {taken}"


def _check_not_pointer(file: Path) -> None:
    if file.stat().st_size > _LFS_MAX_BYTES:
        return
    with file.open("rb") as opened:
        if opened.read(len(_LFS)) == _LFS:
            raise CheckpointError(
                f"{file}: a pointer of Git LFS, not the file itself: run `git lfs pull` in {file.parent}"
            )
