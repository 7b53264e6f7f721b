"""Sampling parameters by the names that KServe and Triton clients use, as fields of SamplingRequest.

Values come from tensors, from JSON and from request parameters, so they are looked at leniently
where clients are known to be: numbers as text, `top_k` of -1, neutral values of what is not built.
Whether a value makes sense is judged later, by the same validator as everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from router.faces.kserve.tensors import shown
from tandem.errors import InvalidRequest, UnsupportedOption
from tandem.types import EarlyStopping

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
    "seed": (-1,),
}
"""Values that ask for nothing, which existing clients send out of habit: taken as left out."""
_NOT_BUILT = frozenset({"bad_words", "best_of", "use_beam_search", "prompt_logprobs"})
"""Known there, without a field here, or without a place in the answer."""


def canonical(name: str) -> str:
    """The name that Tandem uses for what a caller calls `name`."""
    return _ALIASES.get(name, name)


def sampling_values(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of SamplingRequest from settings by canonical name; None = left out.

    Raises InvalidRequest for an unknown name or a value that does not fit, UnsupportedOption for a
    feature that is not built.
    """
    return {name: fitting for name, value in settings.items() if (fitting := _fitting(name, value)) is not None}


def _fitting(name: str, value: Any) -> Any:
    """Returns `value` as the parameter's type; None if the value asks for nothing."""
    single = value[0] if isinstance(value, Sequence) and not isinstance(value, str) and len(value) == 1 else value
    if value is None or any(each == neutral for neutral in _NEUTRAL.get(name, ()) for each in (value, single)):
        return None
    if name in _NOT_BUILT:
        raise UnsupportedOption(name)
    fit = _FITS.get(name)
    if fit is None:
        raise InvalidRequest(shown(name), "no such input or parameter")
    try:
        fitting = fit(value if fit in _OF_SEVERAL else single)
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidRequest(name, "has a value that does not fit it") from error
    if name == "n" and fitting > 1:
        raise UnsupportedOption("sampling.n", "an output has one element per text here; send the text more than once")
    return fitting


def _integer(value: Any) -> int:
    if isinstance(value, bool) or (isinstance(value, float) and not value.is_integer()):
        raise TypeError
    number = int(value)
    if not 0 <= number <= _MAX_UINT64:
        raise ValueError
    return number


def _top_k(value: Any) -> int:
    return 0 if value == -1 else _integer(value)  # both are all


def _number(value: Any) -> float:
    if isinstance(value, bool):
        raise TypeError
    return float(value)


def _flag(value: Any) -> bool:
    if isinstance(value, str) and value.lower() in {"true", "false"}:
        return value.lower() == "true"
    if not isinstance(value, bool):
        raise TypeError
    return value


def _early_stopping(value: Any) -> EarlyStopping:
    """transformers' three, TensorRT-LLM's 0 and 1, or our words."""
    if value in (0, 1) or str(value).lower() in {"true", "false"}:
        return EarlyStopping.ALWAYS if value == 1 or str(value).lower() == "true" else EarlyStopping.HEURISTIC
    return EarlyStopping(_string(value).lower())


def _string(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError
    value.encode()  # JSON can say lone surrogates, which are no text
    return value


def _listed(value: Any) -> list[Any]:
    if isinstance(value, Mapping):
        raise TypeError
    return [each for each in (value if isinstance(value, list) else [value]) if each != ""]  # "" is how "none" is said


def _strings(value: Any) -> tuple[str, ...]:
    return tuple(map(_string, _listed(value)))


def _integers(value: Any) -> tuple[int, ...]:
    return tuple(map(_integer, _listed(value)))


def _biases(value: Any) -> dict[int, float]:
    return {_integer(token_id): _number(bias) for token_id, bias in dict(value).items()}


_OF_SEVERAL = (_strings, _integers, _biases)
"""Readers that take all elements; other readers take the only element."""
_MAX_UINT64 = 2**64 - 1
_FITS: Mapping[str, Callable[[Any], Any]] = {
    **dict.fromkeys(("max_tokens", "min_tokens", "seed", "n", "beam_width"), _integer),
    "top_k": _top_k,
    **dict.fromkeys(("logprobs", "prompt_logprobs"), _integer),
    **dict.fromkeys(("temperature", "top_p", "min_p", "length_penalty"), _number),
    **dict.fromkeys(("repetition_penalty", "presence_penalty", "frequency_penalty"), _number),
    **dict.fromkeys(("include_stop", "ignore_eos", "skip_special_tokens"), _flag),
    **dict.fromkeys(("json_schema", "regex", "grammar"), _string),
    **dict.fromkeys(("stop", "choice"), _strings),
    "stop_token_ids": _integers,
    "logit_bias": _biases,
    "early_stopping": _early_stopping,
}
"""By field of SamplingRequest."""


def boolean(name: str, value: Any) -> bool:
    """Reads true or false, or a word for either. Raises InvalidRequest."""
    try:
        return _flag(value[0] if isinstance(value, list) and len(value) == 1 else value)
    except TypeError as error:
        raise InvalidRequest(name, "must be true or false") from error
