"""Strict reading of a checkpoint's tensors: exactly the expected ones, each of the expected shape.

Owns the open files between `__enter__` and `__exit__`. Tensors that it returns are copies, so
the files may go once it is closed.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from models.tensor_names import EMBEDDING, LM_HEAD, Shape
from models.weight_files import INDEX_FILE, WeightFiles
from tandem.errors import CheckpointError
from tandem.kv_layout import DType

_DTYPES = {"F32": DType.FLOAT32, "BF16": DType.BFLOAT16, "F16": DType.FLOAT16}
"""Element types that are read, by safetensors' names."""

_DERIVED = ".rotary_emb.inv_freq"
"""Old checkpoints store these frequencies, which follow from config.json; they are not read."""


class TensorStore:
    """All tensors of one checkpoint, checked against `expected` when entered.

    Raises CheckpointError naming the file or tensor that is missing, extra, misshapen,
    of an unsupported type, or unreadable.
    """

    def __init__(self, files: WeightFiles, expected: Mapping[str, Shape]) -> None:
        self._weight_files = files
        self._expected = expected
        self._stack = ExitStack()
        self._opened: dict[Path, Any] = {}
        self._path_of: dict[str, Path] = {}

    def __enter__(self) -> TensorStore:
        try:
            for path in self._weight_files.paths:
                self._open(path)
            self._check_index()
            self._check_names()
            self._check_shapes()
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def saved_dtype(self) -> DType:
        """What the embedding was saved as."""
        return _DTYPES[self._slice(EMBEDDING).get_dtype()]

    def read(self, name: str, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A copy of one tensor."""
        try:
            tensor: torch.Tensor = self._opened[self._path_of[name]].get_tensor(name)
        except SafetensorError as error:
            raise CheckpointError(f"{self._path_of[name]}: {name}: {error}") from error
        return tensor.to(device=device, dtype=dtype, copy=True)

    def read_stacked(self, names: tuple[str, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Tensors joined along their first dimension, such as q, k and v of one layer."""
        return torch.cat([self.read(name, dtype, device) for name in names])

    def _open(self, path: Path) -> None:
        try:
            opened = self._stack.enter_context(safe_open(path, framework="pt", device="cpu"))
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path}: is no readable safetensors file: {error}") from error
        self._opened[path] = opened
        for name in opened.keys():  # noqa: SIM118 - not a dict
            if name in self._path_of:
                raise CheckpointError(f"{path}: {name}: tensor is also in {self._path_of[name].name}")
            self._path_of[name] = path

    def _check_index(self) -> None:
        weight_map = self._weight_files.weight_map
        if weight_map is None:
            return
        for name, file_name in weight_map.items():
            path = self._path_of.get(name)
            if path is None or path.name != file_name:
                raise CheckpointError(f"{name}: tensor is missing from {file_name}, where {INDEX_FILE} has it")

    def _check_names(self) -> None:
        missing = [name for name in self._expected if name not in self._path_of]
        if missing:
            folder = self._weight_files.paths[0].parent
            raise CheckpointError(f"{missing[0]}: tensor is missing from {folder}{_more(missing)}")
        extra = [name for name in self._path_of if name not in self._expected and not name.endswith(_DERIVED)]
        if LM_HEAD in extra and self._is_tied_copy():
            extra.remove(LM_HEAD)
        if extra:
            path = self._path_of[extra[0]]
            raise CheckpointError(f"{extra[0]}: tensor in {path} does not belong to this model{_more(extra)}")

    def _check_shapes(self) -> None:
        for name, shape in self._expected.items():
            found = self._slice(name)
            if tuple(found.get_shape()) != shape:
                raise CheckpointError(
                    f"{name}: tensor in {self._path_of[name]} has shape {list(found.get_shape())}, not {list(shape)}"
                )
            if found.get_dtype() not in _DTYPES:
                raise CheckpointError(f"{name}: tensor in {self._path_of[name]} has type {found.get_dtype()}")

    def _is_tied_copy(self) -> bool:
        """Whether an output projection that a tied model needs not is at least the embedding's copy."""
        head, embedding = self._slice(LM_HEAD), self._slice(EMBEDDING)
        return list(head.get_shape()) == list(embedding.get_shape()) and torch.equal(head[:], embedding[:])

    def _slice(self, name: str) -> Any:
        return self._opened[self._path_of[name]].get_slice(name)


def _more(names: list[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""
