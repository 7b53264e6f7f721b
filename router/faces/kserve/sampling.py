"""Sampling parameters by the names that KServe and Triton clients use, onto Tandem's own message.

Values come from tensors, from JSON and from request parameters, so they are looked at leniently
where clients are known to be: numbers as text, `top_k` of -1, neutral values of what is not built.
Whether a value makes sense is judged later, by the same validator as everywhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from google.protobuf.descriptor import FieldDescriptor

from router.faces.kserve.tensors import shown
from tandem.errors import InvalidRequest, UnsupportedOption
from tandem.v1 import inference_pb2

_FIELDS: Mapping[str, Any] = dict(inference_pb2.SamplingParams.DESCRIPTOR.fields_by_name)
"""A copy: protobuf's own mapping fails on names that are not valid UTF-8."""
_ALIASES = {
    "include_stop_str_in_output": "include_stop",
    "stop_words": "stop",
    "random_seed": "seed",
    "min_length": "min_tokens",
}
"""Names in Triton's vLLM and TensorRT-LLM backends that differ from ours."""
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "beam_width": (1,),
    "length_penalty": (1,),
    "best_of": (1,),
    "use_beam_search": (False,),
    "bad_words": ("", []),
    "top_k": (-1,),
    "seed": (-1,),
}
"""Values that ask for nothing, which existing clients send out of habit: taken as left out."""
_NOT_BUILT = frozenset({"bad_words", "best_of", "use_beam_search"})
"""Known there, without a field here. What has a field and is not built is refused by `tandem.sampling`."""
_FLOATS = frozenset({FieldDescriptor.CPPTYPE_FLOAT, FieldDescriptor.CPPTYPE_DOUBLE})
_INTEGERS = frozenset({FieldDescriptor.CPPTYPE_UINT32, FieldDescriptor.CPPTYPE_UINT64})


def canonical(name: str) -> str:
    """The name that Tandem uses for what a caller calls `name`."""
    return _ALIASES.get(name, name)


def set_sampling(message: inference_pb2.SamplingParams, name: str, value: Any) -> None:
    """Sets one parameter by its canonical name; None = left out.

    Raises InvalidRequest for an unknown name or a value that does not fit, UnsupportedOption for a
    feature that is not built.
    """
    single = value[0] if isinstance(value, Sequence) and not isinstance(value, str) and len(value) == 1 else value
    if value is None or any(each == neutral for neutral in _NEUTRAL.get(name, ()) for each in (value, single)):
        return
    if name in _NOT_BUILT:
        raise UnsupportedOption(name)
    field = _FIELDS.get(name)
    if field is None:
        raise InvalidRequest(shown(name), "no such input or parameter")
    try:
        fitting = _fit(field, value, single)
        message.MergeFrom(inference_pb2.SamplingParams(**{name: fitting}))
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidRequest(name, "has a value that does not fit it") from error


def _fit(field: FieldDescriptor, value: Any, single: Any) -> Any:
    """`value` as the field's type; raises TypeError, ValueError, OverflowError."""
    if field.name == "logit_bias":
        return {int(token_id): float(bias) for token_id, bias in dict(value).items()}
    if isinstance(value, Mapping):
        raise TypeError
    if field.name == "choice":
        return inference_pb2.ChoiceConstraint(choices=list(value))
    if field.is_repeated:
        each = value if isinstance(value, list) else [value]
        return [_scalar(field, one) for one in each if one != ""]  # "" is how "none" is said there
    return _scalar(field, single)


def _scalar(field: FieldDescriptor, value: Any) -> Any:
    if field.cpp_type == FieldDescriptor.CPPTYPE_BOOL:
        return boolean(field.name, value)
    if isinstance(value, bool):
        raise TypeError
    if field.cpp_type in _FLOATS:
        return float(value)
    if field.cpp_type in _INTEGERS:
        if isinstance(value, float) and not value.is_integer():
            raise ValueError
        return int(value)
    return value


def boolean(name: str, value: Any) -> bool:
    """True or false, or one of the words. Raises InvalidRequest."""
    single = value[0] if isinstance(value, list) and len(value) == 1 else value
    if isinstance(single, str) and single.lower() in {"true", "false"}:
        return single.lower() == "true"
    if not isinstance(single, bool):
        raise InvalidRequest(name, "must be true or false")
    return single
