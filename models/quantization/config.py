"""What config.json says of how a checkpoint was quantised; what is not read is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from models.config_json import ConfigJson
from models.quantization.gptq import AwqScheme, GptqScheme
from models.quantization.methods import REMEDY, SECTIONS
from models.quantization.mxfp4 import Mxfp4Scheme
from models.quantization.nvfp4 import Nvfp4Scheme
from models.quantization.scaled import ScaledScheme
from models.quantization.scheme import Scheme

_PER_OUTPUT = -1
_FORMATS = (
    *("dense", "int-quantized", "float-quantized", "naive-quantized", "pack-quantized"),
    "mixed-precision",
)
"""Formats of compressed-tensors that are read, besides the next one, which must be the only one."""
_NVFP4 = "nvfp4-pack-quantized"
_TORCHAO = (
    *("Int8WeightOnlyConfig", "Int8DynamicActivationInt8WeightConfig", "IntxWeightOnlyConfig"),
    *("Float8WeightOnlyConfig", "Float8DynamicActivationFloat8WeightConfig"),
)
"""What torchao writes as plain values with scales; its 4-bit forms are laid out for one processor each."""


@dataclass(frozen=True, slots=True)
class Quantization:
    """How the weights of a checkpoint are stored."""

    method: str
    """The method's name in config.json."""
    scheme: Scheme
    rounds_activations: bool = False
    """Whether it was made for activations in 8 bits too; here they stay as they are."""
    of_experts: bool = False
    """Whether what is quantised is stacked experts `[X, in, out]`, else linear maps."""


def read_quantization(config: ConfigJson) -> Quantization | None:
    """What `config` says, or None of a plain checkpoint. Raises CheckpointError naming the key."""
    key = next((key for key in SECTIONS if config.has(key)), None)
    if key is None:
        return None
    section = config.section(key)
    method = section.text("quant_method", "")
    reader = _READERS.get(method)
    if reader is None:
        raise section.error("quant_method", f"{method!r} is not read ({', '.join(_READERS)}): {REMEDY}")
    return reader(section)


def _read_gptq(section: ConfigJson) -> Quantization:
    key = "checkpoint_format" if section.has("checkpoint_format") else "format"
    version = section.text(key, "gptq")
    if version not in {"gptq", "gptq_v2"} or section.flag("is_marlin_format", default=False):
        raise section.error(key, f"only gptq and gptq_v2 are read: {REMEDY}")
    variants = [section, *(section.section("dynamic").sections())]  # exceptions by module
    bits = {_bits(each, "bits", (4, 8)) for each in variants if each is section or each.has("bits")}
    groups = {_group(each) for each in variants if each is section or each.has("group_size")}
    return Quantization("gptq", GptqScheme(tuple(sorted(bits)), tuple(sorted(groups)), version == "gptq"))


def _read_awq(section: ConfigJson) -> Quantization:
    key = "version" if section.has("version") else "format"
    if section.text(key, "gemm").lower() != "gemm":
        raise section.error(key, f"only gemm is read: {REMEDY}")
    if not section.flag("zero_point", default=True):
        raise section.error("zero_point", f"AWQ without zero points is not read: {REMEDY}")
    _bits(section, "bits" if section.has("bits") else "w_bit", (4,))
    return Quantization("awq", AwqScheme(_group(section)))


def _read_fp8(section: ConfigJson) -> Quantization:
    block = section.integers("weight_block_size") if section.has("weight_block_size") else ()
    if block and (len(block) != 2 or min(block) < 1):
        raise section.error("weight_block_size", f"is {list(block)}, not two positive integers")
    scale = "weight_scale_inv" if block else "weight_scale"
    scheme = ScaledScheme(scale=scale, block=(block[0], block[1]) if block else None)
    return Quantization(section.text("quant_method"), scheme, rounds_activations=True)


def _read_compressed(section: ConfigJson) -> Quantization:
    groups = section.section("config_groups").sections()
    rounds_activations = any(group.has("input_activations") for group in groups)
    if {each.text("format", _NVFP4) for each in (section, *groups)} == {_NVFP4}:
        packed = Nvfp4Scheme("weight_packed", "weight_global_scale", divides=True)
        return Quantization("compressed-tensors", packed, rounds_activations)
    for each in (section, *groups):
        written = each.text("format", "dense")
        if written not in _FORMATS:
            raise each.error("format", f"{written!r} is not read ({', '.join(_FORMATS)}): {REMEDY}")
    for key in ("transform_config", "sparsity_config"):
        part = section.section(key)
        if part.section("config_groups").sections() or part.text("format", "dense") != "dense":
            raise section.error(key, f"is not read: {REMEDY}")
    bits, sizes, blocks = {8}, set[int](), set[tuple[int, ...]]()
    for each in (group.section("weights") for group in groups if group.has("weights")):
        bits.add(_bits(each, "num_bits", (8,) if each.text("type", "int") == "float" else (4, 8)))
        if each.has("group_size"):
            sizes.add(_group(each))
        if each.has("block_structure"):
            blocks.add(each.integers("block_structure"))
    if len(blocks) > 1 or any(len(block) != 2 or min(block) < 1 for block in blocks):
        raise section.error("config_groups", f"blocks {sorted(blocks)} are not one pair of positive integers")
    block = next(((block[0], block[1]) for block in blocks), None)
    scheme = ScaledScheme(bits=tuple(sorted(bits)), groups=tuple(sorted(sizes - {_PER_OUTPUT})), block=block)
    return Quantization("compressed-tensors", scheme, rounds_activations)


def _read_modelopt(section: ConfigJson) -> Quantization:
    schemes: dict[str, Scheme] = {
        "FP8": ScaledScheme(),
        "NVFP4": Nvfp4Scheme("weight", "weight_scale_2", divides=False),
    }
    algorithm = section.text("quant_algo", "")
    if algorithm not in schemes:
        raise section.error("quant_algo", f"{algorithm!r} is not read ({', '.join(schemes)}): {REMEDY}")
    return Quantization("modelopt", schemes[algorithm], rounds_activations=True)


def _read_torchao(section: ConfigJson) -> Quantization:
    kind = section.section("quant_type").section("default")
    name = kind.text("_type")
    if name not in _TORCHAO:
        raise section.error("quant_type", f"{name!r} is not read ({', '.join(_TORCHAO)}): {REMEDY}")
    told = kind.section("_data")
    places = (told, told.section("granularity"), told.section("granularity").section("_data"))
    sizes = {_group(each) for each in places if each.has("group_size")} - {_PER_OUTPUT}
    scheme = ScaledScheme(
        scale="_weight_scale", values="_weight_qdata", zeros="_weight_zero_point", groups=tuple(sizes)
    )
    return Quantization("torchao", scheme, "DynamicActivation" in name)


def _bits(section: ConfigJson, key: str, allowed: tuple[int, ...]) -> int:
    bits = section.integer(key)
    if bits not in allowed:
        raise section.error(key, f"{bits} bits are not read ({', '.join(map(str, allowed))}): {REMEDY}")
    return bits


def _group(section: ConfigJson) -> int:
    key = "group_size" if section.has("group_size") else "q_group_size"
    size = section.integer(key, 128, minimum=_PER_OUTPUT)
    if size == 0:
        raise section.error(key, "is 0")
    return size


def _read_mxfp4(_: ConfigJson) -> Quantization:
    return Quantization("mxfp4", Mxfp4Scheme(), of_experts=True)


_READERS: dict[str, Callable[[ConfigJson], Quantization]] = {
    "gptq": _read_gptq,
    "awq": _read_awq,
    "fp8": _read_fp8,
    "fbgemm_fp8": _read_fp8,
    "compressed-tensors": _read_compressed,
    "torchao": _read_torchao,
    "modelopt": _read_modelopt,
    "mxfp4": _read_mxfp4,
}
