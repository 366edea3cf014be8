"""Safetensors checkpoints in 4 bits, quantised in groups of inputs: AWQ, GPTQ and compressed-tensors `pack-quantized`.

All three mean ``w = (q - z) * s``: a code q and a zero z of 4 bits, and a scale s of each output and group of inputs.
They differ in how codes lie in words of 32 bits. In blocks such weights stay what they are, to the bit: the codes, and
of 32, 64 or 128 inputs, as many as a group allows, one scale and, unless every zero is 8, the zero.

Source: AutoAWQ's ``packing_utils.py`` (`gemm`); GPTQModel's ``convert_gptq_v1_to_v2_format`` (what a stored zero
lacks); compressed-tensors' ``pack_quantized``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NoReturn

import numpy as np
import torch
from torch import Tensor

from ..core.errors import CapabilityError, ConfigError
from .blocks import BY_NAME, GROUPED, BlockType, StoredRows
from .files import StoredTensor, get_tensor, opened
from .quant_config import BLOCK, NAMES, ORIGINAL, GroupQuant

_AT_ONCE = 1 << 22  # codes that are unpacked together
_RESTORE = "download or copy the checkpoint again"


@dataclass(frozen=True, slots=True)
class GroupTensor:
    """The weight of one linear, which lies in several tensors of a checkpoint."""

    name: str  # of the weight, as if it were plain
    quant: GroupQuant
    shape: tuple[int, int]  # [n, k]: outputs, inputs
    parts: Mapping[str, StoredTensor]  # as of `GroupQuant.parts`

    @property
    def type(self) -> BlockType:
        """Return the block type that holds it exactly."""
        values = next(values for values in (128, 64, BLOCK) if self._group % values == 0)
        return GROUPED.get((values, not self.quant.symmetric), BY_NAME["q4_0"])

    @property
    def _group(self) -> int:
        """Return how many inputs share a scale."""
        return self.shape[1] if self.quant.group_size == -1 else self.quant.group_size

    @property
    def nbytes(self) -> int:
        """Return the bytes in blocks."""
        return self.shape[0] * self.type.row_bytes(self.shape[1])

    def stored(self) -> StoredRows:
        """Return the weight's rows in blocks.

        Raises:
            ConfigError: as of `values`, or a scale that 16 bits cannot hold.
        """
        (n, k), source, order = self.shape, f"tensor {self.name}", self._order()
        kind, rows = self.type, np.empty((n, self.type.row_bytes(k)), np.uint8)
        blocks = self._group // kind.values  # of a group
        for some, codes, zeros, scale in self._numbers(order):
            halves = scale.half()
            if not torch.equal(halves.float(), scale):
                wrong = f"its scale {float(scale[halves.float() != scale][0]):g} is not a float16, as in blocks"
                raise CapabilityError(source, wrong, "load it with dtype='bfloat16', 'float32' or 'int8'")
            parts = [halves.repeat_interleave(blocks, 1).unsqueeze(-1).view(torch.uint8)]  # [outputs, blocks, bytes]
            if not self.quant.symmetric:
                parts.append(zeros.repeat_interleave(blocks, 1).unsqueeze(-1))
            steps = codes.reshape(len(codes), -1, 2, 16)
            parts.append((steps[:, :, 0] | steps[:, :, 1] << 4).reshape(len(codes), -1, kind.values // 2))
            rows[some] = torch.cat(parts, -1).flatten(1).numpy()
        inputs = None if order is None else order.int()
        return StoredRows(self.type, rows, torch.arange(n), source, inputs=inputs)

    def values(self) -> Tensor:
        """Return [n, k] float32.

        Raises:
            ConfigError: a tensor that cannot be read, a scale that is not finite, or parts that contradict.
        """
        weight, order = torch.empty(self.shape), self._order()
        for some, codes, zeros, scale in self._numbers(order):
            whole = codes.view(torch.int8) - zeros.view(torch.int8)[:, :, None]
            numbers = (whole * scale[:, :, None]).flatten(1)
            weight[some] = numbers if order is None else torch.empty_like(numbers).index_copy_(1, order, numbers)
        return weight

    def forget(self) -> None:
        """Do nothing: this weight holds no memory of its files."""

    def _numbers(self, order: Tensor | None) -> Iterator[tuple[slice, Tensor, Tensor, Tensor]]:
        """Yield codes, zeros and scales of some outputs after others.

        Codes are [outputs, groups, inputs], their inputs in ``order``, zeros [outputs, groups], both uint8, and scales
        [outputs, groups] float32.
        """
        method, (n, k) = self.quant.method, self.shape
        if "shape" in self.parts and self._read("shape").tolist() != [n, k]:
            self._refuse("shape", f"it is not {[n, k]}, as config.json has it")
        if "bias" in self.parts and self._read("bias").any():
            self._refuse("bias", "it is not zero, and linears of this model have no bias")
        words, scales = self._read("codes"), self._read("scales").float()
        if not scales.isfinite().all():
            self._refuse("scales", "a scale is not finite")
        scales = scales if method == "compressed-tensors" else scales.T
        zeros = self._zeros().expand(scales.shape)
        step = max(_AT_ONCE // k // 8, 1) * 8
        for first in range(0, n, step):
            some = slice(first, min(first + step, n))
            if method == "awq":
                codes = _nibbles(words[:, first // 8 : -(-some.stop // 8)], interleaved=True).T[: some.stop - first]
            elif method == "gptq":
                codes = _nibbles(words[:, some].T)
            else:
                codes = _nibbles(words[some])
            codes = codes if order is None else codes[:, order]
            yield some, codes.reshape(len(codes), scales.shape[1], -1), zeros[some], scales[some]

    def _zeros(self) -> Tensor:
        """Return [n, groups] uint8, or [1, 1] where all are equal."""
        if "zeros" not in self.parts:
            return torch.full((1, 1), 8, dtype=torch.uint8)
        words = self._read("zeros")
        if self.quant.method == "compressed-tensors":
            zeros = _nibbles(words.T)
        else:
            whole = words.numpy().view(np.uint32) + np.uint32(
                0x11111111 * self.quant.zero_offset
            )  # a carry was borrowed
            zeros = _nibbles(torch.from_numpy(whole.view(np.int32)), interleaved=self.quant.method == "awq")
        if self.quant.symmetric and (zeros != 8).any():
            self._refuse("zeros", "a zero is not 8, and quantization_config has sym")
        return zeros[:, : self.shape[0]].T

    def _order(self) -> Tensor | None:
        """Return [k] inputs sorted by their group; None: they are sorted, or a writer has left the table at -1."""
        if "groups" not in self.parts:
            return None
        groups, k = self._read("groups").long(), self.shape[1]
        size = self._group
        in_order = torch.arange(k) // size
        if torch.equal(groups, in_order) or (self.quant.method == "compressed-tensors" and (groups == -1).any()):
            return None
        if not self.quant.reordered:
            self._refuse("groups", "inputs are out of order, and quantization_config does not have desc_act")
        order = groups.argsort(stable=True)
        if not torch.equal(groups[order], in_order):
            self._refuse("groups", f"it does not give each of {k // size} groups {size} inputs")
        return order

    def _read(self, name: str) -> Tensor:
        part = self.parts[name]
        with opened(part.file, _RESTORE) as tensors:
            return get_tensor(tensors, part, _RESTORE)

    def _refuse(self, name: str, wrong: str) -> NoReturn:
        part = self.parts[name]
        raise ConfigError(f"tensor {part.name} in {part.file}", wrong, _RESTORE)


def _nibbles(words: Tensor, interleaved: bool = False) -> Tensor:
    """Return [rows, 8 columns] uint8 of words [rows, columns] int32, the lowest four bits first.

    ``interleaved``: of eight the first, third, fifth and seventh come first.
    """
    data = words.contiguous().view(torch.uint8)
    codes = torch.stack((data & 15, data >> 4), -1)  # [rows, bytes, 2]
    return (codes.view(len(words), -1, 2, 4).mT if interleaved else codes).flatten(1)


def take_groups(
    quant: GroupQuant | None, shapes: Mapping[str, tuple[int, ...]], stored: dict[str, StoredTensor]
) -> dict[str, GroupTensor]:
    """Take the parts of quantised weights out of a checkpoint's tensors.

    ``shapes`` and ``stored`` are by name; ``quant`` is config.json's entry, None: it has none.

    Raises:
        ConfigError: a part that is missing or misshaped, or such parts without an entry in config.json.
    """
    tensors, mains = {}, {names["codes"] for names in NAMES.values()}
    for name, shape in shapes.items():
        stem = name.removesuffix("weight")
        main = next((last for last in mains if stem + last in stored), None)
        if name in stored or main is None or len(shape) != 2 or name.endswith("embed_tokens.weight"):
            continue
        first = stored[stem + main]
        subject, (n, k) = f"tensor {first.name} in {first.file}", shape
        if quant is None or main != NAMES[quant.method]["codes"]:
            quantization = "no quantization_config" if quant is None else f"quantization_config of {quant.method}"
            raise ConfigError(subject, f"it is quantised, and config.json has {quantization}", _RESTORE)
        if k % (BLOCK if quant.group_size == -1 else quant.group_size):
            size = f"blocks of {BLOCK}" if quant.group_size == -1 else f"groups of {quant.group_size}"
            raise CapabilityError(subject, f"{k} inputs are not whole {size}", ORIGINAL)
        parts = {}
        for role, (types, expected) in quant.parts(n, k).items():
            last = NAMES[quant.method][role]
            if stem + last not in stored:
                raise ConfigError(subject, f"there is no {last} next to it", _RESTORE)
            part = parts[role] = stored.pop(stem + last)
            if part.dtype not in types or part.shape != expected:
                wrong = f"it is {part.dtype} {list(part.shape)}, and config.json needs {types[0]} {list(expected)}"
                raise ConfigError(f"tensor {part.name} in {part.file}", wrong, "use the config.json of these weights")
        bias = stem + "bias"  # old writers gave each linear one, zeros where the model has none
        if quant.method == "gptq" and bias in stored and bias not in shapes:
            parts["bias"] = stored.pop(bias)
        tensors[name] = GroupTensor(name, quant, (n, k), parts)
    return tensors
