"""Parse ``quantization_config`` of a ``config.json`` for weights in 4 bits: AWQ, GPTQ, compressed-tensors.

Unknown names are refused: a form that is guessed wrong gives weights that are wrong.

Source: AutoAWQ's ``AwqConfig``; GPTQModel's ``QuantizeConfig``; compressed-tensors' ``QuantizationConfig``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NoReturn

from ..core.errors import CapabilityError
from ..core.options import shown
from ..model.config_fields import Json

Method = Literal["awq", "gptq", "compressed-tensors"]

BLOCK = 32  # inputs; groups are whole blocks
ORIGINAL = "use the original checkpoint, with dtype='int8' or 'q4_0', or one that was quantised otherwise"
_CONFIG = "quantization_config"
_FLOATS, _WORDS, _WHOLE = ("F16", "BF16", "F32"), ("I32",), ("I32", "I64")
_QWEIGHT = {"codes": "qweight", "scales": "scales", "zeros": "qzeros", "groups": "g_idx"}
NAMES: dict[str, dict[str, str]] = {  # of a linear's tensors, by what they are
    "awq": _QWEIGHT,
    "gptq": _QWEIGHT,
    "compressed-tensors": {
        "codes": "weight_packed",
        "scales": "weight_scale",
        "zeros": "weight_zero_point",
        "groups": "weight_g_idx",
        "shape": "weight_shape",
    },
}


@dataclass(frozen=True, kw_only=True)
class GroupQuant:
    """The quantisation of a checkpoint's linears."""

    method: Method
    group_size: int  # inputs that share a scale; -1: all
    symmetric: bool  # every zero is 8
    reordered: bool  # whether the inputs of a group may lie anywhere (act order)
    zero_offset: int = 0  # a stored zero is less by so much

    def parts(self, n: int, k: int) -> dict[str, tuple[tuple[str, ...], tuple[int, ...]]]:
        """Return the tensors of a linear [n, k]: the types and the shape that each may have, by role."""
        groups, words = 1 if self.group_size == -1 else k // self.group_size, -(-n // 8)
        if self.method == "compressed-tensors":
            shapes = {"codes": (_WORDS, (n, k // 8)), "scales": (_FLOATS, (n, groups)), "shape": (_WHOLE, (2,))}
            shapes |= {} if self.symmetric else {"zeros": (_WORDS, (words, groups))}
            return shapes | ({"groups": (_WHOLE, (k,))} if self.reordered else {})
        codes = (k, words) if self.method == "awq" else (k // 8, n)
        shapes = {"codes": (_WORDS, codes), "zeros": (_WORDS, (groups, words)), "scales": (_FLOATS, (groups, n))}
        return shapes | ({"groups": (_WHOLE, (k,))} if self.method == "gptq" else {})


def read_group_quant(settings: Json) -> GroupQuant:
    """Parse ``quantization_config``.

    Raises:
        CapabilityError: a method, a number of bits or a form that is not read.
    """
    method = settings.get("quant_method")
    if method == "awq":
        return _awq(settings)
    if method == "gptq":
        return _gptq(settings)
    if method == "compressed-tensors":
        return _compressed_tensors(settings)
    wrong = f"weights are plain, or quantised with {', '.join(NAMES)}"
    raise CapabilityError(f"a checkpoint quantised with {shown(method)}", wrong, ORIGINAL)


def _awq(settings: Json) -> GroupQuant:
    _only(settings, "bits", 4)
    for name in ("version", "format", "checkpoint_format"):
        _only(settings, name, "gemm", "GEMM", None)
    _only(settings, "zero_point", True, None)
    _only(settings, "backend", None, "autoawq", "auto")
    return GroupQuant(method="awq", group_size=_group_size(settings), symmetric=False, reordered=False)


def _gptq(settings: Json) -> GroupQuant:
    _only(settings, "bits", 4)
    forms = [_only(settings, name, None, "gptq", "gptq_v2") for name in ("checkpoint_format", "format")]
    _only(settings, "pack_dtype", None, "int32")
    for name in ("is_marlin_format", "adapter", "rotation"):
        _only(settings, name, None, False, "")
    overrides = settings.get("dynamic") or {}
    if not isinstance(overrides, dict) or any(not name.startswith("-:") for name in overrides):
        _refuse_value("dynamic", overrides, "modules that are quantised otherwise than the rest are not read")
    if {*forms} >= {"gptq", "gptq_v2"}:
        _refuse_value("checkpoint_format", forms, "it must be one of them")
    return GroupQuant(
        method="gptq",
        group_size=_group_size(settings),
        symmetric=bool(_only(settings, "sym", True, False, None)),
        reordered=bool(_only(settings, "desc_act", True, False, None)),
        zero_offset=0 if "gptq_v2" in forms else 1,
    )


def _compressed_tensors(settings: Json) -> GroupQuant:
    _only(settings, "format", "pack-quantized")
    for name in ("kv_cache_scheme", "transform_config"):
        _only(settings, name, None, {})
    sparsity = settings.get("sparsity_config") or {}
    if sparsity and (not isinstance(sparsity, dict) or sparsity.get("format") != "dense"):
        _refuse_value("sparsity_config", sparsity, "sparse weights are not read")
    schemes = settings.get("config_groups")
    if not isinstance(schemes, dict) or not schemes:
        _refuse_value("config_groups", schemes, "it must describe how weights are quantised")
    schemes_read = {_scheme(name, scheme) for name, scheme in schemes.items()}
    if len(schemes_read) > 1:
        _refuse_value("config_groups", [*schemes], "linears that are quantised in several ways are not read")
    return schemes_read.pop()


def _scheme(name: str, scheme: Any) -> GroupQuant:
    if not isinstance(scheme, dict) or not isinstance(scheme.get("weights"), dict):
        _refuse_value(f"config_groups: {name}", scheme, "it must describe how weights are quantised")
    weights = scheme["weights"]
    _only(scheme, "format", None, "pack-quantized")
    for other in ("input_activations", "output_activations"):
        _only(scheme, other, None)
    for field, *values in (("num_bits", 4), ("type", None, "int"), ("dynamic", None, False)):
        _only(weights, field, *values)
    whole = _only(weights, "strategy", "group", "channel") == "channel"
    return GroupQuant(
        method="compressed-tensors",
        group_size=-1 if whole else _group_size(weights),
        symmetric=_only(weights, "symmetric", True, False),
        reordered=_only(weights, "actorder", None, False, "weight", "static", True, "group", "dynamic")
        in (True, "group", "dynamic"),
    )


def _group_size(settings: Json) -> int:
    value = settings.get("group_size")
    if type(value) is not int or (value != -1 and (value < BLOCK or value % BLOCK)):
        _refuse_value("group_size", value, f"it must be a multiple of {BLOCK}, or -1")
    return int(value)


def _only(settings: Json, name: str, *values: Any) -> Any:
    """Return a value if it is one of these; None: it must not be set."""
    value = settings.get(name)
    if not any(type(value) is type(allowed) and value == allowed for allowed in values):
        listed = ", ".join(repr(allowed) for allowed in values if allowed is not None) or "nothing"
        _refuse_value(name, value, f"it must be {listed}")
    return value


def _refuse_value(name: str, value: Any, wrong: str) -> NoReturn:
    raise CapabilityError(f"config.json: {_CONFIG}: {name} = {shown(value)}", wrong, ORIGINAL)
