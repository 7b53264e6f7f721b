"""KServe v2 tensors: bytes and typed contents to Python values, and values to raw contents.

    request.inputs + raw_input_contents | contents ──read_tensors──▶ {name: Tensor}

Raw elements are little-endian and in row-major order; a BYTES element follows four bytes of its
length. Source: https://github.com/kserve/open-inference-protocol. Knows no tensor by its meaning.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from tandem.errors import InvalidRequest, UnsupportedOption
from tandem.foreign import kserve_pb2 as pb

Value = bytes | bool | int | float

BYTES = "BYTES"
_LENGTH = struct.Struct("<I")
_SHOWN_CHARACTERS = 64
"""Most characters of a caller's name in an error: statuses travel in trailers, which are small."""

_MAX_DIMENSIONS = 8
"""No input has more than two; their product must stay cheap to take."""

MAX_ELEMENTS = 4096
"""Most elements of all inputs together, and of one list of settings: each element becomes an object on the event loop.
"""


@dataclass(frozen=True, slots=True)
class _Kind:
    """Coding of a datatype."""

    struct_code: str
    contents_field: str | None


_KINDS: Mapping[str, _Kind] = {
    "BOOL": _Kind("?", "bool_contents"),
    "INT8": _Kind("b", "int_contents"),
    "INT16": _Kind("h", "int_contents"),
    "INT32": _Kind("i", "int_contents"),
    "INT64": _Kind("q", "int64_contents"),
    "UINT8": _Kind("B", "uint_contents"),
    "UINT16": _Kind("H", "uint_contents"),
    "UINT32": _Kind("I", "uint_contents"),
    "UINT64": _Kind("Q", "uint64_contents"),
    "FP16": _Kind("e", None),
    "FP32": _Kind("f", "fp32_contents"),
    "FP64": _Kind("d", "fp64_contents"),
    BYTES: _Kind("", "bytes_contents"),
}


@dataclass(frozen=True, slots=True)
class Tensor:
    """An input. `values` in row-major order, as many as `shape` says."""

    datatype: str
    shape: tuple[int, ...]
    values: tuple[Value, ...]


def shown(name: str) -> str:
    """A caller's name, fit for an error: short, and valid UTF-8, which a name from JSON need not be."""
    name = name if len(name) <= _SHOWN_CHARACTERS else f"{name[:_SHOWN_CHARACTERS]}…"
    return name.encode(errors="replace").decode()


def read_tensors(request: pb.ModelInferRequest) -> dict[str, Tensor]:
    """All inputs by name. Raises InvalidRequest and UnsupportedOption that name the input."""
    raws = request.raw_input_contents
    if raws and len(raws) != len(request.inputs):
        raise InvalidRequest("raw_input_contents", f"{len(raws)} entries for {len(request.inputs)} inputs")
    tensors: dict[str, Tensor] = {}
    num_elements = 0
    for index, message in enumerate(request.inputs):
        field = f"inputs.{shown(message.name)}"
        if message.name in tensors:
            raise InvalidRequest(field, "is given twice")
        _refuse_parameters(field, message.parameters)
        count = _count(field, message.shape)
        num_elements += count
        if num_elements > MAX_ELEMENTS:
            raise InvalidRequest(field, f"with it the inputs hold more than {MAX_ELEMENTS} elements")
        values = _values(field, message, count, raws[index] if raws else None)
        tensors[message.name] = Tensor(message.datatype, tuple(message.shape), values)
    return tensors


def pack_bytes(values: Iterable[bytes]) -> bytes:
    """Raw contents of a BYTES tensor."""
    return b"".join(_LENGTH.pack(len(value)) + value for value in values)


def pack_uint32(values: Iterable[int]) -> bytes:
    """Raw contents of a UINT32 tensor."""
    return b"".join(_LENGTH.pack(value) for value in values)


def _refuse_parameters(field: str, parameters: Mapping[str, pb.InferParameter]) -> None:
    for name in parameters:
        if name.startswith("shared_memory"):
            raise UnsupportedOption(field, "shared memory is not supported; send the elements in the request")
        raise InvalidRequest(f"{field}.{shown(name)}", "no such parameter of an input")


def _count(field: str, shape: Sequence[int]) -> int:
    if len(shape) > _MAX_DIMENSIONS or any(dimension < 0 for dimension in shape):
        raise InvalidRequest(field, f"must have at most {_MAX_DIMENSIONS} dimensions, none of them negative")
    return math.prod(shape)


def _values(
    field: str, message: pb.ModelInferRequest.InferInputTensor, count: int, raw: bytes | None
) -> tuple[Value, ...]:
    kind = _KINDS.get(message.datatype)
    if kind is None:
        raise InvalidRequest(field, f"datatype {shown(message.datatype)!r} is not known; known are {', '.join(_KINDS)}")
    if raw is None:
        return _typed_values(field, message, kind, count)
    if message.HasField("contents"):
        raise InvalidRequest(field, "has elements both in contents and in raw_input_contents")
    return _raw_bytes(field, raw, count) if message.datatype == BYTES else _raw_numbers(field, raw, count, kind)


def _typed_values(
    field: str, message: pb.ModelInferRequest.InferInputTensor, kind: _Kind, count: int
) -> tuple[Value, ...]:
    given = [descriptor.name for descriptor, _ in message.contents.ListFields()]
    if any(name != kind.contents_field for name in given):
        raise InvalidRequest(field, f"a {message.datatype} tensor has its elements in {kind.contents_field or 'raw'}")
    values = () if kind.contents_field is None else getattr(message.contents, kind.contents_field)
    if len(values) != count:
        raise InvalidRequest(field, f"{len(values)} elements do not fill its shape of {count}")
    return tuple(values)


def _raw_numbers(field: str, raw: bytes, count: int, kind: _Kind) -> tuple[Value, ...]:
    size = struct.calcsize(f"<{kind.struct_code}")
    if len(raw) != count * size:
        raise InvalidRequest(field, f"{len(raw)} bytes do not fill its shape of {count} elements of {size}")
    return struct.unpack(f"<{count}{kind.struct_code}", raw)


def _raw_bytes(field: str, raw: bytes, count: int) -> tuple[Value, ...]:
    values: list[Value] = []
    start = 0
    while start < len(raw) and len(values) < count:
        end = start + _LENGTH.size
        if end <= len(raw):
            end += _LENGTH.unpack_from(raw, start)[0]
        if end > len(raw):
            raise InvalidRequest(field, f"element {len(values)} ends beyond its {len(raw)} bytes")
        values.append(raw[start + _LENGTH.size : end])
        start = end
    if len(values) != count or start != len(raw):
        raise InvalidRequest(field, f"its {len(raw)} bytes are not the {count} elements of its shape")
    return tuple(values)
