"""From a ModelInferRequest to what it asks for: texts, how to sample, what to answer.

Settings come by three ways, none over another: one tensor each, a JSON object in the tensor
`sampling_parameters`, request parameters. Given twice is refused. Judges shape and names only;
the texts and values are judged at the entrance, like everybody's.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from router.faces.kserve.model import DEFAULT_OUTPUTS, OUTPUTS, VERSION
from router.faces.kserve.tensors import BYTES, MAX_ELEMENTS, Tensor, read_tensors, shown
from router.request import CompletionRequest, TextPrompt
from router.sampling import SamplingRequest
from tandem.errors import InvalidRequest, ModelNotFound, UnsupportedOption
from tandem.foreign import kserve_pb2 as pb
from tandem.types import EarlyStopping

MAX_TEXTS = 64
"""Most texts of a ModelInfer."""
_MAX_ENTRIES = 128
"""Inputs, outputs, parameters: more than there are names."""
_MAX_JSON_CHARACTERS = 128 * 1024
"""Room for stop strings and biases at their default caps."""
_MAX_MICROSECONDS = 2**63 - 1
_TEXT = "text_input"
_JSON = "sampling_parameters"
_RETURNS = {
    "return_finish_reason": "finish_reason",
    "return_num_input_tokens": "num_input_tokens",
    "return_num_output_tokens": "num_output_tokens",
    "return_num_cached_tokens": "num_cached_tokens",
}
"""Inputs that switch an output on or off."""
_NOT_BUILT = frozenset({"return_logprobs", "return_cumulative_logprob"})
_SEQUENCES = frozenset({"sequence_id", "sequence_start", "sequence_end"})
_NOT_SERVED = frozenset({"image", "embedding_request"})
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
_NO_SAMPLING = frozenset({"bad_words", "best_of", "use_beam_search", "prompt_logprobs"})
"""Known there, without a field here, or without a place in the answer."""


@dataclass(frozen=True, slots=True)
class InferRequest:
    """A request as read."""

    id: str
    shape: tuple[int, ...]
    """Shape of the texts, and of every output."""
    completions: tuple[CompletionRequest, ...]
    """A completion per text."""
    echoes: tuple[str, ...]
    """What the answer to each text begins with: the text itself, or nothing."""
    stream: bool
    outputs: tuple[str, ...]
    timeout_s: float | None
    empty_final_response: bool


def check_version(version: str) -> None:
    """Empty means any. Raises ModelNotFound."""
    if version not in {"", VERSION}:
        raise ModelNotFound(f"the model has version {VERSION} only")


def read_request(request: pb.ModelInferRequest) -> InferRequest:
    """Raises InvalidRequest, UnsupportedOption, ModelNotFound; each names the input or parameter."""
    check_version(request.model_version)
    for field in ("inputs", "outputs", "parameters"):
        num_entries = len(getattr(request, field))
        if num_entries > _MAX_ENTRIES:
            raise InvalidRequest(field, f"{num_entries} entries exceed the limit of {_MAX_ENTRIES}")
    tensors = read_tensors(request)
    texts, shape = _texts(tensors.pop(_TEXT, None))
    settings = _settings(tensors, request.parameters)
    stream = _pop_flag(settings, "stream", default=False)
    echo = not _pop_flag(settings, "exclude_input_in_output", default=True)
    if echo and stream:
        raise InvalidRequest("exclude_input_in_output", "must be true on a stream")
    return InferRequest(
        id=request.id,
        shape=shape,
        outputs=_outputs(request, settings),
        stream=stream,
        echoes=texts if echo else ("",) * len(texts),
        timeout_s=_timeout_s(settings.pop("timeout", None)),
        empty_final_response=_pop_flag(settings, "triton_enable_empty_final_response", default=False),
        completions=_completions(request, texts, settings),
    )


def _texts(tensor: Tensor | None) -> tuple[tuple[str, ...], tuple[int, ...]]:
    if tensor is None:
        raise InvalidRequest(f"inputs.{_TEXT}", "is missing")
    if tensor.datatype != BYTES:
        raise InvalidRequest(f"inputs.{_TEXT}", f"must be BYTES, not {tensor.datatype}")
    if len(tensor.shape) not in {1, 2} or tensor.shape[1:] not in {(), (1,)}:
        raise InvalidRequest(f"inputs.{_TEXT}", f"its shape must be [N] or [N, 1], not {list(tensor.shape[:8])}")
    if not 1 <= len(tensor.values) <= MAX_TEXTS:
        raise InvalidRequest(f"inputs.{_TEXT}", f"must hold 1 to {MAX_TEXTS} texts, not {len(tensor.values)}")
    return tuple(_text(f"inputs.{_TEXT}", value) for value in tensor.values), tensor.shape


def _settings(tensors: Mapping[str, Tensor], parameters: Mapping[str, pb.InferParameter]) -> dict[str, Any]:
    """All that was set, by canonical name."""
    settings: dict[str, Any] = {}

    def add(name: str, value: Any) -> None:
        name = "stream" if name == "streaming" else _ALIASES.get(name, name)
        if name in settings:
            raise InvalidRequest(shown(name), "is given twice")
        if isinstance(value, list | dict) and len(value) > MAX_ELEMENTS:
            raise InvalidRequest(shown(name), f"{len(value)} elements exceed the limit of {MAX_ELEMENTS}")
        settings[name] = value

    for name, tensor in tensors.items():
        values = [_text(f"inputs.{shown(name)}", each) if isinstance(each, bytes) else each for each in tensor.values]
        if name != _JSON:
            add(name, values)
            continue
        for key, value in _json_object(values).items():
            add(key, value)
    for name, parameter in parameters.items():
        choice = parameter.WhichOneof("parameter_choice")
        if choice is None:
            raise InvalidRequest(f"parameters.{shown(name)}", "has no value")
        add(name, getattr(parameter, choice))
    return settings


def _json_object(values: list[Any]) -> dict[str, Any]:
    if len(values) != 1:
        raise InvalidRequest(f"inputs.{_JSON}", f"must hold one element, not {len(values)}")
    if isinstance(values[0], str) and len(values[0]) > _MAX_JSON_CHARACTERS:
        raise InvalidRequest(f"inputs.{_JSON}", f"is longer than {_MAX_JSON_CHARACTERS} characters")
    try:
        parsed = json.loads(values[0])
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequest(f"inputs.{_JSON}", "is not JSON") from error
    if not isinstance(parsed, dict):
        raise InvalidRequest(f"inputs.{_JSON}", "is not a JSON object")
    return parsed


def _outputs(request: pb.ModelInferRequest, settings: dict[str, Any]) -> tuple[str, ...]:
    """Those asked for by name, else the default, as the return_… inputs change it."""
    for output in request.outputs:
        if output.name not in OUTPUTS:
            raise InvalidRequest(f"outputs.{shown(output.name)}", f"no such output; there are {', '.join(OUTPUTS)}")
        for name in output.parameters:
            raise UnsupportedOption(f"outputs.{output.name}.{shown(name)}")
    wanted = dict.fromkeys(each.name for each in request.outputs) or dict.fromkeys(DEFAULT_OUTPUTS)
    for setting, output_name in _RETURNS.items():
        if setting not in settings:
            continue
        if _boolean(setting, settings.pop(setting)):
            wanted[output_name] = None
        elif not request.outputs:
            wanted.pop(output_name, None)
    return tuple(wanted)


def _pop_flag(settings: dict[str, Any], name: str, *, default: bool) -> bool:
    return _boolean(name, settings.pop(name, default))


def _timeout_s(value: Any) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= _MAX_MICROSECONDS:
        raise InvalidRequest("parameters.timeout", "must be a number of microseconds")
    return value / 1e6 if value else None  # 0 = none, as in Triton


def _completions(
    request: pb.ModelInferRequest, texts: tuple[str, ...], settings: dict[str, Any]
) -> tuple[CompletionRequest, ...]:
    for name in _NOT_BUILT & settings.keys():
        if _boolean(name, settings.pop(name)):
            raise UnsupportedOption(name)
    for name in settings.keys() & (_SEQUENCES | _NOT_SERVED):
        raise UnsupportedOption(name)
    priority = _priority(settings.pop("priority", 0))
    sampling = SamplingRequest(**sampling_values(settings))
    model = request.model_name
    return tuple(CompletionRequest(TextPrompt(text), sampling, request.id, model, priority) for text in texts)


def _priority(level: Any) -> int:
    """Triton's lower levels go first, Tandem's larger numbers."""
    if isinstance(level, bool) or not isinstance(level, int) or not 0 <= level < 2**31:
        raise InvalidRequest("parameters.priority", "must be a level from 0 on, 0 first")
    return -level


def _text(field: str, value: Any) -> str:
    try:
        return bytes(value).decode()
    except UnicodeDecodeError as error:
        raise InvalidRequest(field, "is not valid UTF-8") from error


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
    if name in _NO_SAMPLING:
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


def _boolean(name: str, value: Any) -> bool:
    """Reads true or false, or a word for either. Raises InvalidRequest."""
    try:
        return _flag(value[0] if isinstance(value, list) and len(value) == 1 else value)
    except TypeError as error:
        raise InvalidRequest(name, "must be true or false") from error
