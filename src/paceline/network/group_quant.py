"""Safetensors checkpoints in 4 bits, quantised in groups of inputs: AWQ, GPTQ and compressed-tensors `pack-quantized`.

All three say ``w = (q - z) * s``: a code q and a zero z of 4 bits, and a scale s of each output and group of inputs.
They differ in how codes lie in words of 32 bits. In blocks of 32 inputs such weights stay what they are, to the bit: as
Q4_0 where every zero is 8, else as Q5_0, whose codes q - z + 16 have five bits.

Source: AutoAWQ's ``packing_utils.py`` (`gemm`); GPTQModel's ``convert_gptq_v1_to_v2_format`` (what a stored zero
lacks); compressed-tensors' ``pack_quantized``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NoReturn

import numpy as np
import torch
from torch import Tensor

from ..core.errors import CapabilityError, ConfigError
from ..core.options import shown
from .blocks import BY_NAME, BlockType, StoredRows
from .config_fields import Json
from .files import StoredTensor, get_tensor, opened

Method = Literal["awq", "gptq", "compressed-tensors"]

_BLOCK = 32
_CONFIG = "config.json: quantization_config"
_ORIGINAL = "use the original checkpoint, with dtype='int8' or 'q4_0', or one that was quantised otherwise"
_RESTORE = "download or copy the checkpoint again"
_FLOATS, _WHOLE = ("F16", "BF16", "F32"), ("I32", "I64")
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # where output 0, 1, ... of eight lies in a word
_CODES = {"awq": "qweight", "gptq": "qweight", "compressed-tensors": "weight_packed"}


@dataclass(frozen=True, kw_only=True)
class GroupQuant:
    """How a checkpoint's linears are quantised."""

    method: Method
    group_size: int  # inputs that share a scale; -1: all
    symmetric: bool  # every zero is 8
    reordered: bool  # whether the inputs of a group may lie anywhere (act order)
    zero_offset: int = 0  # a stored zero is less by so much

    def parts(self, n: int, k: int) -> dict[str, tuple[tuple[str, ...], tuple[int, ...]]]:
        """The tensors of a linear [n, k]: by their last name what types and shape they have."""
        groups, i32 = 1 if self.group_size == -1 else k // self.group_size, ("I32",)
        words = -(-n // 8)
        if self.method == "compressed-tensors":
            found = {
                "weight_packed": (i32, (n, k // 8)),
                "weight_scale": (_FLOATS, (n, groups)),
                "weight_shape": (_WHOLE, (2,)),
            }
            found |= {} if self.symmetric else {"weight_zero_point": (i32, (words, groups))}
            return found | ({"weight_g_idx": (_WHOLE, (k,))} if self.reordered else {})
        codes = (k, words) if self.method == "awq" else (k // 8, n)
        found = {"qweight": (i32, codes), "qzeros": (i32, (groups, words)), "scales": (_FLOATS, (groups, n))}
        return found | ({"g_idx": (_WHOLE, (k,))} if self.method == "gptq" else {})


@dataclass(frozen=True, slots=True)
class GroupTensor:
    """The weight of one linear, which lies in several tensors of a checkpoint."""

    name: str  # of the weight, as if it were plain
    quant: GroupQuant
    shape: tuple[int, int]  # [n, k]: outputs, inputs
    parts: Mapping[str, StoredTensor]

    @property
    def type(self) -> BlockType:
        """The blocks that hold it exactly."""
        return BY_NAME["q4_0" if self.quant.symmetric else "q5_0"]

    @property
    def nbytes(self) -> int:
        """Bytes in blocks."""
        return self.shape[0] * self.type.row_bytes(self.shape[1])

    @property
    def in_blocks(self) -> bool:
        return True

    def require_product(self) -> None:
        """Every such weight has a product."""

    def stored(self) -> StoredRows:
        """Its rows in blocks.

        Raises:
            ConfigError: as of `values`, or a scale that is no number of 16 bits.
        """
        (n, k), source = self.shape, f"tensor {self.name}"
        codes, scale, order = self._numbers()
        halves = scale.half()
        if not torch.equal(halves.float(), scale):
            wrong = f"its scale {float(scale[halves.float() != scale][0]):g} is no float16, as which blocks hold scales"
            raise CapabilityError(source, wrong, "load it with dtype='bfloat16', 'float32' or 'int8'")
        five = self.type.name == "q5_0"
        whole = (codes + (16 if five else 8)).view(torch.uint8).reshape(n, -1, 2, 16)  # [n, blocks, halves, 16]
        lower = whole & 15
        blocks = halves.repeat_interleave(k // scale.shape[1] // _BLOCK, 1).unsqueeze(-1).view(torch.uint8).numpy()
        bits = [np.packbits(whole.reshape(n, -1, _BLOCK).numpy() >> 4, axis=-1, bitorder="little")] if five else []
        rows = np.concatenate((blocks, *bits, (lower[:, :, 0] | lower[:, :, 1] << 4).numpy()), -1)
        inputs = None if order is None else order.int()
        return StoredRows(self.type, rows.reshape(n, -1), torch.arange(n), source, inputs=inputs)

    def values(self) -> Tensor:
        """[n, k] float32.

        Raises:
            ConfigError: a tensor that cannot be read, a scale that is no finite number, or parts that contradict.
        """
        codes, scale, order = self._numbers()
        weight = (codes * scale[:, :, None]).view(self.shape)
        return weight if order is None else torch.empty_like(weight).index_copy_(1, order, weight)

    def forget(self) -> None:
        """Nothing of its files is held."""

    def _numbers(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """``q - z`` [n, groups, inputs] int8, scales [n, groups] float32, and which input comes first, second, ...

        The last is None where they are in order.
        """
        quant, (n, k) = self.quant, self.shape
        if quant.method == "compressed-tensors":
            if self._read("weight_shape").tolist() != [n, k]:
                self._refuse("weight_shape", f"it is not {[n, k]}, as config.json has it")
            codes, scale = _nibbles(self._read("weight_packed")).flatten(1), self._read("weight_scale")
        else:
            codes, scale = _nibbles(self._read("qweight")), self._read("scales").T
            codes = codes[..., _AWQ_ORDER].flatten(1)[:, :n].T if quant.method == "awq" else codes.permute(1, 0, 2)
        if not scale.isfinite().all():
            self._refuse("weight_scale" if "weight_scale" in self.parts else "scales", "a scale is no finite number")
        if "bias" in self.parts and self._read("bias").any():
            self._refuse("bias", "it is not zero, and linears of this model have no bias")
        zeros, order = self._zeros(), self._order(scale.shape[1])
        if quant.symmetric and (zeros != 8).any():
            self._refuse("qzeros", "a zero is not 8, and quantization_config says sym")
        codes = codes.reshape(n, k)
        if order is not None:
            codes = codes[:, order]
        return codes.reshape(n, scale.shape[1], -1).view(torch.int8) - zeros[:, :, None], scale.float(), order

    def _zeros(self) -> Tensor:
        """[n, groups] int8, or [1, 1] of what all are."""
        if "weight_zero_point" in self.parts:
            zeros = _nibbles(self._read("weight_zero_point").T).flatten(1)
        elif "qzeros" in self.parts:
            words = self._read("qzeros").numpy().view(np.uint32)
            words = words + np.uint32(0x11111111 * self.quant.zero_offset)  # carries are what the writer has borrowed
            zeros = _nibbles(torch.from_numpy(words.view(np.int32)))
            zeros = zeros[..., _AWQ_ORDER if self.quant.method == "awq" else slice(None)].flatten(1)
        else:
            return torch.full((1, 1), 8, dtype=torch.int8)
        return zeros[:, : self.shape[0]].T.contiguous().view(torch.int8)

    def _order(self, groups: int) -> Tensor | None:
        """[k] inputs sorted by their group; None: they are sorted, or a writer has left the table at -1."""
        name = "weight_g_idx" if "weight_g_idx" in self.parts else "g_idx"
        if name not in self.parts:
            return None
        own, k = self._read(name).long(), self.shape[1]
        sorted_groups = torch.arange(k) // (k // groups)
        if torch.equal(own, sorted_groups) or (name == "weight_g_idx" and (own == -1).any()):
            return None
        if not self.quant.reordered:
            self._refuse(name, "inputs are out of order, and quantization_config does not say desc_act")
        order = own.argsort(stable=True)
        if not torch.equal(own[order], sorted_groups):
            self._refuse(name, f"it does not give each of {groups} groups {k // groups} inputs")
        return order

    def _read(self, name: str) -> Tensor:
        part = self.parts[name]
        with opened(part.file, _RESTORE) as tensors:
            return get_tensor(tensors, part, _RESTORE)

    def _refuse(self, name: str, wrong: str) -> NoReturn:
        part = self.parts[name]
        raise ConfigError(f"tensor {part.name} in {part.file}", wrong, _RESTORE)


def _nibbles(words: Tensor) -> Tensor:
    """[.., 8] uint8 of words [..] int32, the lowest four bits first."""
    data = words.contiguous().view(torch.uint8).view(*words.shape, 4)
    return torch.stack((data & 15, data >> 4), -1).flatten(-2)


def take_groups(
    quant: GroupQuant | None, shapes: Mapping[str, tuple[int, ...]], stored: dict[str, StoredTensor]
) -> dict[str, GroupTensor]:
    """Take the parts of quantised weights out of a checkpoint's tensors.

    Args:
        quant: what config.json says; None: nothing.
        shapes: of the weights that are wanted, by name.
        stored: all tensors by name; those that are taken are removed.

    Raises:
        ConfigError: a part that is missing or misshaped, or such parts without a word of them in config.json.
    """
    found = {}
    for name, shape in shapes.items():
        if len(shape) != 2 or name.endswith("embed_tokens.weight"):
            continue
        stem = name.removesuffix("weight")
        main = next((code for code in {*_CODES.values()} if stem + code in stored), None)
        if name in stored or main is None:
            continue
        first = stored[stem + main]
        asked, (n, k) = f"tensor {first.name} in {first.file}", shape
        if quant is None or main != _CODES[quant.method]:
            said = "no quantization_config" if quant is None else f"quantization_config of {quant.method}"
            raise ConfigError(asked, f"it is quantised, and config.json has {said}", _RESTORE)
        if k % (_BLOCK if quant.group_size == -1 else quant.group_size):
            size = f"blocks of {_BLOCK}" if quant.group_size == -1 else f"groups of {quant.group_size}"
            raise CapabilityError(asked, f"{k} inputs are not whole {size}", _ORIGINAL)
        parts = {}
        for last, (types, wanted) in quant.parts(n, k).items():
            if stem + last not in stored:
                raise ConfigError(asked, f"there is no {last} beside it", _RESTORE)
            part = parts[last] = stored.pop(stem + last)
            if part.dtype not in types or part.shape != wanted:
                wrong = f"it is {part.dtype} {list(part.shape)}, and config.json asks for {types[0]} {list(wanted)}"
                raise ConfigError(f"tensor {part.name} in {part.file}", wrong, "use the config.json of these weights")
        bias = stem + "bias"  # old writers gave each linear one, zeros where the model has none
        if quant.method == "gptq" and bias in stored and bias not in shapes:
            parts["bias"] = stored.pop(bias)
        found[name] = GroupTensor(name, quant, (n, k), parts)
    return found


# --- config.json ----------------------------------------------------------------------------------------------


def read_group_quant(said: Json) -> GroupQuant:
    """What ``quantization_config`` says.

    Raises:
        CapabilityError: a method, a number of bits or a form that is not read.
        ConfigError: values that contradict or cannot be.
    """
    method = said.get("quant_method")
    if method == "awq":
        return _awq(said)
    if method == "gptq":
        return _gptq(said)
    if method == "compressed-tensors":
        return _compressed_tensors(said)
    wrong = f"what is read is plain, or quantised with {', '.join(_CODES)}"
    raise CapabilityError(f"a checkpoint quantised with {shown(method)}", wrong, _ORIGINAL)


def _awq(said: Json) -> GroupQuant:
    _only(said, "bits", 4)
    for name in ("version", "format", "checkpoint_format"):
        _only(said, name, "gemm", "GEMM", None)
    _only(said, "zero_point", True, None)
    _only(said, "backend", None, "autoawq", "auto")
    return GroupQuant(method="awq", group_size=_group_size(said), symmetric=False, reordered=False)


def _gptq(said: Json) -> GroupQuant:
    _only(said, "bits", 4)
    forms = [_only(said, name, None, "gptq", "gptq_v2") for name in ("checkpoint_format", "format")]
    _only(said, "pack_dtype", None, "int32")
    for name in ("is_marlin_format", "adapter", "rotation"):
        _only(said, name, None, False, "")
    overrides = said.get("dynamic") or {}
    if not isinstance(overrides, dict) or any(not name.startswith("-:") for name in overrides):
        _refuse_value("dynamic", overrides, "modules that are quantised otherwise than the rest are not read")
    if {*forms} >= {"gptq", "gptq_v2"}:
        raise ConfigError(_CONFIG, f"it says two formats, {' and '.join(map(str, forms))}", _RESTORE)
    return GroupQuant(
        method="gptq",
        group_size=_group_size(said),
        symmetric=bool(_only(said, "sym", True, False, None)),
        reordered=bool(_only(said, "desc_act", True, False, None)),
        zero_offset=0 if "gptq_v2" in forms else 1,
    )


def _compressed_tensors(said: Json) -> GroupQuant:
    _only(said, "format", "pack-quantized")
    _only(said, "quantization_status", None, "compressed")
    for name in ("kv_cache_scheme", "transform_config"):
        _only(said, name, None, {})
    sparsity = said.get("sparsity_config") or {}
    if sparsity and (not isinstance(sparsity, dict) or sparsity.get("format") != "dense"):
        _refuse_value("sparsity_config", sparsity, "sparse weights are not read")
    schemes = said.get("config_groups")
    if not isinstance(schemes, dict) or not schemes:
        _refuse_value("config_groups", schemes, "it must say how weights are quantised")
    found = {_scheme(name, scheme) for name, scheme in schemes.items()}
    if len(found) > 1:
        _refuse_value("config_groups", [*schemes], "linears that are quantised in several ways are not read")
    return found.pop()


def _scheme(name: str, scheme: Any) -> GroupQuant:
    if not isinstance(scheme, dict) or not isinstance(scheme.get("weights"), dict):
        _refuse_value(f"config_groups: {name}", scheme, "it must say how weights are quantised")
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


def _group_size(said: Json) -> int:
    value = said.get("group_size")
    if type(value) is not int or (value != -1 and (value < _BLOCK or value % _BLOCK)):
        _refuse_value("group_size", value, f"what is read is a multiple of {_BLOCK}, or -1")
    return int(value)


def _only(said: Json, name: str, *values: Any) -> Any:
    """What is said, if it is one of these values; None: nothing may be said."""
    value = said.get(name)
    if not any(type(value) is type(known) and value == known for known in values):
        listed = ", ".join(repr(known) for known in values if known is not None) or "nothing"
        _refuse_value(name, value, f"what is read is {listed}")
    return value


def _refuse_value(name: str, value: Any, wrong: str) -> NoReturn:
    raise CapabilityError(f"{_CONFIG}: {name} = {shown(value)}", wrong, _ORIGINAL)
