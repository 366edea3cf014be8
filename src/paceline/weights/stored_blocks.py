"""Which parameters of a checkpoint stay in blocks, whatever its format."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from ..core.errors import CapabilityError
from ..model.families import DecoderConfig
from ..model.padding import STEP, groups_of, padded
from .gguf import PLAIN, GGUFTensor
from .group_quant import GroupTensor
from .names import Piece

log = logging.getLogger(__name__)

BlockTensor = GGUFTensor | GroupTensor
Pieces = Sequence[tuple[Piece, BlockTensor]]


def in_blocks(pieces: Pieces, config: DecoderConfig) -> dict[str, list[BlockTensor]]:
    """Return parameters that stay in the blocks of their files, by name.

    Each is tensors that follow each other, which are read as they are packed.

    Raises:
        CapabilityError: a tensor of a type without products here, which only a plain dtype can load.
    """
    named: dict[str, list[tuple[Piece, BlockTensor]]] = {}
    for piece, tensor in pieces:
        if isinstance(tensor, GGUFTensor) and tensor.type.name not in PLAIN and not tensor.type.compiled:
            wrong = f"there is no product with its type {tensor.type.name}"
            raise CapabilityError(str(tensor), wrong, "load it with dtype='int8' or 'bfloat16'")
        named.setdefault(piece.into, []).append((piece, tensor))
    whole = {name: parts for name, parts in named.items() if _stays(name, parts, groups_of(config))}
    wide = [name for name, parts in named.items() if name not in whole and any(map(_blocked, parts))]
    if wide:
        why = f"heads of {config.head_dim} are not a multiple of {STEP}, or a part of a product is plain"
        log.warning("%d weights in blocks become bfloat16, %s the first: %s", len(wide), wide[0], why)
    return {name: [tensor for _, tensor in sorted(parts, key=lambda pair: pair[0].at)] for name, parts in whole.items()}


def _stays(name: str, pieces: Pieces, groups: Mapping[str, tuple[int, int]]) -> bool:
    """Return whether products with these blocks are compiled: inputs are contiguous, and parts are whole lines."""
    if not all(_blocked(one) and len(one[1].shape) == 2 for one in pieces):
        return False
    inputs, outputs = groups.get(name.split(".")[-2] if "." in name else "", (0, 0))
    if padded(inputs) != inputs:
        return False
    types = {tensor.type for _, tensor in pieces}
    rows = [tensor.shape[0] // (outputs or 1) * padded(outputs) if outputs else tensor.shape[0] for _, tensor in pieces]
    return len(types) == 1 or all(count % STEP == 0 for count in rows)


def _blocked(one: tuple[Piece, BlockTensor]) -> bool:
    return one[1].type.compiled
