"""Which parameters of a checkpoint stay in blocks, whatever its format."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence

from .blocks import StoredRows
from .families import DecoderConfig
from .gguf import GGUFTensor
from .group_quant import GroupTensor
from .padding import STEP, groups_of, padded
from .weights import Piece

log = logging.getLogger(__name__)

BlockTensor = GGUFTensor | GroupTensor
Pieces = Sequence[tuple[Piece, BlockTensor]]


class InBlocks(Mapping[str, Sequence[StoredRows]]):
    """Parameters that stay in the blocks of their files: each is read from there as it is packed.

    Raises:
        CapabilityError: a tensor of a type without products here, which only a plain dtype can load.
    """

    def __init__(self, pieces: Pieces, config: DecoderConfig) -> None:
        found: dict[str, list[tuple[Piece, BlockTensor]]] = {}
        for piece, tensor in pieces:
            if isinstance(tensor, GGUFTensor):
                tensor.require_product()
            found.setdefault(piece.into, []).append((piece, tensor))
        self._pieces = {name: own for name, own in found.items() if _stays(name, own, groups_of(config))}
        wide = [name for name, own in found.items() if name not in self._pieces and any(map(_blocked, own))]
        if wide:
            why = f"heads of {config.head_dim} are no multiple of {STEP}, or a part of a product is plain"
            log.warning("%d weights in blocks become bfloat16, %s the first: %s", len(wide), wide[0], why)

    def __getitem__(self, name: str) -> Sequence[StoredRows]:
        return [tensor.stored() for _, tensor in sorted(self._pieces[name], key=lambda pair: pair[0].at)]

    def __contains__(self, name: object) -> bool:
        return name in self._pieces  # Mapping's own would make the rows' addresses

    def __iter__(self) -> Iterator[str]:
        return iter(self._pieces)

    def __len__(self) -> int:
        return len(self._pieces)

    @property
    def nbytes(self) -> int:
        """Bytes in blocks."""
        return sum(tensor.nbytes for own in self._pieces.values() for _, tensor in own)


def _stays(name: str, own: Pieces, groups: Mapping[str, tuple[int, int]]) -> bool:
    """Whether products with these blocks are compiled: nothing goes between their inputs, and parts are whole lines."""
    if not all(_blocked(one) and len(one[1].shape) == 2 for one in own):
        return False
    inputs, outputs = groups.get(name.split(".")[-2] if "." in name else "", (0, 0))
    if padded(inputs) != inputs:
        return False
    types = {tensor.type for _, tensor in own}
    rows = [tensor.shape[0] // (outputs or 1) * padded(outputs) if outputs else tensor.shape[0] for _, tensor in own]
    return len(types) == 1 or all(count % STEP == 0 for count in rows)


def _blocked(one: tuple[Piece, BlockTensor]) -> bool:
    return one[1].type.unpack is not None
