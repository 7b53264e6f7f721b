"""Strict reading of a checkpoint's tensors: exactly the expected ones, each of the expected shape.

Where the checkpoint is quantised, a weight is expected as its scheme stores it (`models.quantization`).

Owns the open files between `__enter__` and `__exit__`. Tensors that it returns are copies, so
the files may go once it is closed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from kernels.quantized import QuantizedWeight
from models.quantization.config import Quantization
from models.quantization.scheme import Header, Spec
from models.tensor_names import EMBEDDING, LM_HEAD, Shape
from models.weight_files import INDEX_FILE, WeightFiles
from tandem.errors import CheckpointError
from tandem.kv_layout import DType

_DTYPES = {"F32": DType.FLOAT32, "BF16": DType.BFLOAT16, "F16": DType.FLOAT16}
"""Element types of plain tensors, by safetensors' names."""

_WEIGHT = ".weight"

_DERIVED = ".rotary_emb.inv_freq"
"""Old checkpoints store these frequencies, which follow from config.json; they are not read."""
_KV_SCALES = (".q_scale", ".k_scale", ".v_scale")
"""Scales of a quantised checkpoint for KV in 8 bits, which are not read."""


class TensorStore:
    """All tensors of one checkpoint, checked against `expected` when entered.

    Raises CheckpointError naming the file or tensor that is missing, extra, misshapen,
    of an unsupported type, or unreadable.
    """

    def __init__(
        self,
        files: WeightFiles,
        expected: Mapping[str, Shape],
        quantization: Quantization | None = None,
        rename: Callable[[str], str | None] = str,
    ) -> None:
        """`rename`: from a name in the files to the expected one; None is of no concern and not read."""
        self._rename = rename
        self._weight_files = files
        self._shapes = expected
        self._quantization = quantization
        self._expected: dict[str, Spec] = {}
        self._parts: dict[str, tuple[str, ...]] = {}
        """By the name of a weight what stands for it, if it is quantised."""
        self._stack = ExitStack()
        self._opened: dict[Path, Any] = {}
        self._path_of: dict[str, Path] = {}
        self._stored: dict[str, str] = {}
        """What the files call each tensor."""

    def __enter__(self) -> TensorStore:
        try:
            for path in self._weight_files.paths:
                self._open(path)
            self._check_index()
            self._expect()
            self._check_names()
            self._check_shapes()
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @property
    def method(self) -> str | None:
        """How weights are stored, or None if weights are plain."""
        return self._quantization.method if self._quantization else None

    @property
    def rounds_activations(self) -> bool:
        """Whether the checkpoint was made for activations in 8 bits."""
        return self._quantization is not None and self._quantization.rounds_activations

    def saved_dtype(self) -> DType:
        """What the embedding was saved as."""
        return _DTYPES[self._slice(EMBEDDING).get_dtype()]

    def read(self, name: str, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Returns a copy of a tensor that is not quantised."""
        return self._read(name).to(device=device, dtype=dtype, copy=True)

    def is_quantized(self, name: str) -> bool:
        """Whether the weight `name` is stored quantised."""
        return name in self._parts

    def read_weight(self, name: str, dtype: torch.dtype, device: torch.device) -> torch.Tensor | QuantizedWeight:
        """The weight of one linear map, for activations of `dtype`, in the form that the checkpoint has it in."""
        if name not in self._parts:
            return self.read(name, dtype, device)
        assert self._quantization is not None
        module = name.removesuffix(_WEIGHT)
        parts = {part: self._read(f"{module}.{part}") for part in self._parts[name]}
        try:
            return self._quantization.scheme.decode(self._shapes[name], parts, dtype).to(device)
        except ValueError as error:
            raise CheckpointError(f"{module}: {error}") from error

    def _read(self, name: str) -> torch.Tensor:
        try:
            tensor: torch.Tensor = self._opened[self._path_of[name]].get_tensor(self._stored[name])
        except SafetensorError as error:
            raise CheckpointError(f"{self._path_of[name]}: {name}: {error}") from error
        return tensor

    def _open(self, path: Path) -> None:
        try:
            opened = self._stack.enter_context(safe_open(path, framework="pt", device="cpu"))
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path}: is no readable safetensors file: {error}: download it again") from error
        self._opened[path] = opened
        for stored in opened.keys():  # noqa: SIM118 - not a dict
            name = self._rename(stored)
            if name is None:
                continue
            if name in self._path_of:
                raise CheckpointError(f"{path}: {name}: tensor is also in {self._path_of[name].name}")
            self._path_of[name] = path
            self._stored[name] = stored

    def _check_index(self) -> None:
        weight_map = self._weight_files.weight_map
        if weight_map is None:
            return
        for stored, file_name in weight_map.items():
            name = self._rename(stored)
            if name is None:
                continue
            path = self._path_of.get(name)
            if path is None or path.name != file_name:
                raise CheckpointError(f"{name}: tensor is missing from {file_name}, where {INDEX_FILE} has it")

    def _expect(self) -> None:
        """What must be there, given how each weight is stored."""
        headers: dict[str, dict[str, Header]] = {}
        for name in self._path_of if self._quantization else ():
            module, _, part = name.rpartition(".")
            found = self._slice(name)
            headers.setdefault(module, {})[part] = Header(tuple(found.get_shape()), found.get_dtype())
        num_dims = 3 if self._quantization and self._quantization.of_experts else 2
        for name, shape in self._shapes.items():
            specs = None
            module = name.removesuffix(_WEIGHT)
            if self._quantization and name.endswith(_WEIGHT) and name != EMBEDDING and len(shape) == num_dims:
                specs = self._quantization.scheme.specs(shape, headers.get(module, {}))
            if specs is None:
                self._expected[name] = Spec((shape,))
                continue
            self._parts[name] = tuple(part for part in specs if f"{module}.{part}" in self._path_of)
            self._expected = {f"{module}.{part}": spec for part, spec in specs.items()} | self._expected

    def _check_names(self) -> None:
        missing = [name for name, spec in self._expected.items() if spec.is_required and name not in self._path_of]
        if missing:
            folder = self._weight_files.paths[0].parent
            raise CheckpointError(f"{missing[0]}: tensor is missing from {folder}{_more(missing)}")
        unread = (_DERIVED, *_KV_SCALES) if self._quantization else _DERIVED
        extra = [name for name in self._path_of if name not in self._expected and not name.endswith(unread)]
        if LM_HEAD in extra and self._is_tied_copy():
            extra.remove(LM_HEAD)
        if extra:
            path = self._path_of[extra[0]]
            raise CheckpointError(f"{extra[0]}: tensor in {path} does not belong to this model{_more(extra)}")

    def _check_shapes(self) -> None:
        for name, spec in self._expected.items():
            if name not in self._path_of:
                continue
            found = self._slice(name)
            where = f"{name}: tensor in {self._path_of[name]}"
            if tuple(found.get_shape()) not in spec.shapes:
                wanted = " or ".join(str(list(shape)) for shape in dict.fromkeys(spec.shapes))
                raise CheckpointError(f"{where} has shape {list(found.get_shape())}, not {wanted}")
            if found.get_dtype() not in spec.dtypes:
                raise CheckpointError(f"{where} has type {found.get_dtype()}")
            if spec.is_zero and self._read(name).any():
                raise CheckpointError(f"{where} does not belong to this model: it is not zero")

    def _is_tied_copy(self) -> bool:
        """Whether an output projection that a tied model needs not is at least the embedding's copy."""
        head, embedding = self._slice(LM_HEAD), self._slice(EMBEDDING)
        return list(head.get_shape()) == list(embedding.get_shape()) and torch.equal(head[:], embedding[:])

    def _slice(self, name: str) -> Any:
        return self._opened[self._path_of[name]].get_slice(self._stored[name])


def _more(names: list[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""
