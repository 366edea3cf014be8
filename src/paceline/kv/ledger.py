"""The ledger of K/V slots: the sequence that holds each, and what is committed. K and V lie in stores, one a process.

    a sequence's logical positions

        0 ............. committed | ................ front | ..... front + reserved | room left in the last block
        K/V of tokens that are    | rows of passes that    | rows of the next pass  |
        part of the answer        | are not settled yet    |                        |
                                  |            the speculative region               |

`reserve` opens the region for a pass. `commit` keeps some of its rows (a longer committed length for a chain, a
compaction for a tree) and drops the others; `settle` lets rows stay while fewer are committed, for subtrees that were
computed ahead. With several passes in flight, `enter` marks the begin of a pass: rows reserved then follow it.

Rows are moved by `settle` and `commit` alone. A store in another process learns of that in the order of the passes, so
that a pass that was sent before a move has written its rows before they are moved; until then pruned rows are dropped
from what later rows see, and nothing else changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from ..core.errors import ConfigError, PoolFullError
from ..model.attention.base import PADDING_SLOTS
from .blocks import ROOT_CONTENT, BlockAllocator

# A reused prefix is copied rather than shared while this many times its blocks are empty.
COPY_MARGIN = 4


class SlotStore(Protocol):
    """Storage of K and V for the slots: in this process, in others, or in several."""

    def copy_slots(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy K and V of every layer, all reads before the first write, after all passes begun before."""
        ...


class Ledger:
    """Blocks, prefixes and sequences of one pool of slots, ``num_tokens`` rounded up to whole blocks.

    Args:
        store: copies K and V where rows are moved, or prefixes copied.
        device: where index tensors of scattered slots go.
        scratch_slots: slots that belong to no sequence, for K and V that only one pass needs.

    Raises:
        ConfigError: no slot.
    """

    def __init__(
        self, num_tokens: int, store: SlotStore, device: torch.device, block_size: int = 16, scratch_slots: int = 0
    ) -> None:
        num_blocks = -(-num_tokens // block_size)
        if num_blocks < 1:
            raise ConfigError(f"a K/V pool of {num_tokens} tokens", "it holds no block", "raise kv_memory")
        self.block_size = block_size
        self.num_tokens = num_blocks * block_size
        self.allocator = BlockAllocator(num_blocks)
        self.sequences: set[SequenceCache] = set()
        self.store, self.device = store, device
        self.scratch_slots = scratch_slots
        self._roots: dict[str, int] = {}  # identity -> its root content

    def scratch(self, count: int) -> slice:
        """Return the first ``count`` scratch slots; each pass overwrites what the previous one wrote there.

        Raises:
            PoolFullError: there are fewer.
        """
        if count > self.scratch_slots:
            raise PoolFullError(f"{count} scratch slots wanted, the pool has {self.scratch_slots}")
        first = self.num_tokens + PADDING_SLOTS
        return slice(first, first + count)

    def content_root(self, identity: str | None) -> int:
        """Return the content id before the first block of sequences whose K/V depends on more than their tokens.

        It stands for what has this identity (an adapter), or for the base model alone (None).
        """
        if identity is None:
            return ROOT_CONTENT
        return self._roots.setdefault(identity, ROOT_CONTENT - 1 - len(self._roots))

    def open(
        self,
        tokens: Sequence[int] = (),
        reuse: int | None = None,
        expected: int | None = None,
        identity: str | None = None,
        shareable: int | None = None,
    ) -> SequenceCache:
        """Return a new sequence, which starts with the longest published prefix of ``tokens``.

        At least one token is left to compute, since a sequence needs the output of its last token.

        Args:
            tokens: what the sequence begins with.
            reuse: leading tokens that may be found at most: the others are to be computed, since more is wanted of
                them than K/V; None: all.
            expected: tokens that the sequence may come to hold, where that is known: it is placed where that
                many slots in a row are empty. Nothing is reserved for it.
            identity: only blocks of the same identity are found; see `content_root`.
            shareable: leading tokens whose K/V depends on tokens and identity alone, so that blocks of them are
                found and published; None: all.
        """
        sequence = SequenceCache(self, expected, self.content_root(identity), shareable)
        self.sequences.add(sequence)
        if reuse is None or reuse > 0:
            sequence._adopt(tokens, reuse)
        return sequence

    def cost(
        self,
        tokens: Sequence[int],
        most: int,
        reuse: int | None = None,
        identity: str | None = None,
        shareable: int | None = None,
    ) -> tuple[int, int]:
        """Return the cost of opening a sequence and reserving at most so many rows for its next tokens.

        The cost is these rows, and the free blocks that are used up then; nothing is changed.
        """
        root = self.content_root(identity)
        cached = [block for block, _ in self._lookup(tokens, root, shareable, reuse)]
        prefix = len(cached) * self.block_size
        rows = min(len(tokens) - prefix, most)
        fresh = -(-(prefix + rows) // self.block_size) - len(cached)
        adopted = len(cached) if self._copies(cached) else sum(self.allocator.is_free(block) for block in cached)
        return rows, fresh + adopted

    def _copies(self, prefix: Sequence[int]) -> bool:
        """Return whether a new sequence copies these blocks instead of sharing them.

        A sequence that cannot grow right after the shared blocks would be gathered in every step. One copy costs as
        much as one such gather, so it is copied while there is plenty of empty room.
        """
        if not prefix:
            return False
        in_place = all(b == prefix[0] + i for i, b in enumerate(prefix)) and self.allocator.is_empty(prefix[-1] + 1)
        return not in_place and self.allocator.num_empty > COPY_MARGIN * len(prefix)

    def _lookup(self, tokens: Sequence[int], root: int, *limits: int | None) -> list[tuple[int, int]]:
        """Return (block, content id) of each published block at the front of ``tokens``, within all limits."""
        hits: list[tuple[int, int]] = []
        content = root
        most = min([len(tokens) - 1, *[limit for limit in limits if limit is not None]])
        for start in range(0, most - self.block_size + 1, self.block_size):
            hit = self.allocator.find(content, tokens[start : start + self.block_size])
            if hit is None:
                break
            hits.append(hit)
            content = hit[1]
        return hits

    def commit(self, accepted: Sequence[tuple[SequenceCache, Sequence[int]]]) -> None:
        """Keep rows of several sequences' speculative regions and drop the others.

        For each sequence: the rows to keep, ascending, counted from its committed length.
        """
        self.settle([(sequence, rows, len(rows)) for sequence, rows in accepted])

    def settle(self, accepted: Sequence[tuple[SequenceCache, Sequence[int], int]]) -> None:
        """Keep rows of several sequences' speculative regions, of which the first are committed; drop the others.

        For each sequence: the rows to keep, ascending, counted from its committed length, and how many of them are part
        of the answer now. Kept rows that are not committed become the first rows of the region, in its order, and
        counts as entered.
        """
        sources: list[int] = []
        targets: list[int] = []
        for sequence, rows, commit in accepted:
            if commit < len(rows) or (rows and rows[-1] != commit - 1):  # else the first ones stay where they are
                sequence.moves(rows, sources, targets)
            sequence.advance(commit)
            sequence.front += len(rows) - commit
        if sources:
            self.store.copy_slots(sources, targets)

    def _copy_blocks(self, source: Sequence[int], target: Sequence[int]) -> None:
        """Copy K and V of whole blocks."""
        size = range(self.block_size)
        sources, targets = ([b * self.block_size + i for b in blocks for i in size] for blocks in (source, target))
        self.store.copy_slots(sources, targets)

    def forget(self) -> None:
        """Forget the K/V of ended sequences: no later prompt finds any of it."""
        self.allocator.forget()

    def reset(self) -> None:
        """Empty the pool, whatever state it is in: every sequence's view of it ends, and no prefix is found again."""
        self.allocator = BlockAllocator(self.allocator.num_blocks)
        for sequence in self.sequences:
            sequence.detach()
        self.sequences = set()

    @property
    def idle(self) -> bool:
        """Return whether no sequence holds a block."""
        return not self.sequences and self.allocator.num_free == self.allocator.num_blocks

    def check_idle(self) -> None:
        """Assert that nothing is held while nothing runs (cheap; `check_integrity` checks every block)."""
        assert not self.sequences, f"{len(self.sequences)} sequences still hold blocks"
        assert self.allocator.num_free == self.allocator.num_blocks, "blocks were lost"

    def check_integrity(self) -> None:
        """Assert the invariants of pool, tables and allocator."""
        for sequence in self.sequences:
            assert 0 <= sequence.committed <= sequence.front <= sequence.capacity
            assert sequence.front + sequence.reserved <= sequence.capacity
        self.allocator.check_integrity([sequence.blocks for sequence in self.sequences])


@dataclass(slots=True, eq=False)
class SequenceCache:
    """One sequence's view of the pool: a block table and the length that is committed."""

    pool: Ledger
    expected: int | None = None  # tokens it may come to hold; None: not known
    _content: int = ROOT_CONTENT  # content id of the last published block
    shareable: int | None = None  # leading tokens whose blocks others may use; None: all
    blocks: list[int] = field(default_factory=list)
    committed: int = 0  # tokens whose K/V is kept
    reserved: int = 0  # rows of the speculative region after ``front``
    front: int = 0  # where the next pass begins: after committed tokens and rows that are not settled yet
    reused: int = 0  # tokens found in the pool when the sequence was opened
    _contiguous: bool = True
    _slots: Tensor | None = None  # [capacity] int64, built when the blocks are not contiguous
    _published: int = 0  # blocks published or adopted

    @property
    def capacity(self) -> int:
        """Return the slots of the blocks that the sequence holds."""
        return len(self.blocks) * self.pool.block_size

    @property
    def ahead(self) -> int:
        """Return the rows that passes have begun to compute and that are not settled yet."""
        return self.front - self.committed

    def _adopt(self, tokens: Sequence[int], most: int | None) -> None:
        """Begin with the published blocks at the front of ``tokens``: shared, or copied where that pays."""
        pool, allocator = self.pool, self.pool.allocator
        hits = pool._lookup(tokens, self._content, self.shareable, most)
        if not hits:
            return
        blocks = [block for block, _ in hits]
        copies = pool._copies(blocks)
        for block in blocks:
            allocator.share(block)
        if copies:
            for _ in blocks:
                self._append(self._allocate())
            pool._copy_blocks(blocks, self.blocks)
            for block in reversed(blocks):
                allocator.free(block)
        else:
            for block in blocks:
                self._append(block)
        self._content = hits[-1][1]
        self._published = len(self.blocks)
        self.committed = self.front = self.reused = self.capacity

    def _allocate(self) -> int:
        """Return the next block, after the last one if that is possible."""
        want = None
        if self.expected is not None:
            want = max(1, -(-self.expected // self.pool.block_size) - len(self.blocks))
        return self.pool.allocator.allocate(self.blocks[-1] if self.blocks else None, want)

    def _append(self, block: int) -> None:
        if self.blocks and block != self.blocks[-1] + 1:
            self._contiguous = False
        self.blocks.append(block)
        self._slots = None

    def blocks_short(self, rows: int) -> int:
        """Return how many blocks must be allocated before ``rows`` rows can be reserved."""
        size = self.pool.block_size
        return max(0, -(-(self.front + rows) // size) - len(self.blocks))

    def reserve_here(self, rows: int) -> bool:
        """Reserve rows in the blocks that the sequence holds; False: they do not suffice, and nothing was changed."""
        if self.front + rows > len(self.blocks) * self.pool.block_size:
            return False
        self.reserved = rows
        return True

    def reserve(self, rows: int) -> None:
        """Open the speculative region for a pass: ``rows`` rows after the committed ones and those ahead.

        Raises:
            PoolFullError: not enough free blocks; nothing was changed.
        """
        if self.reserve_here(rows):
            return
        short = self.blocks_short(rows)
        allocator = self.pool.allocator
        if short > allocator.num_free:
            raise PoolFullError(f"{short} blocks wanted, {allocator.num_free} free")
        for _ in range(short):
            self._append(self._allocate())
        self.reserved = rows

    def enter(self) -> int:
        """Begin to compute what is reserved; return the position of its first row.

        Passes that begin before earlier ones are settled need it; a row's ancestors are fixed from here on.
        """
        first = self.front
        self.front += self.reserved
        self.reserved = 0
        return first

    def moves(self, rows: Sequence[int], sources: list[int], targets: list[int]) -> None:
        """Append the slots that rows of the speculative region leave, and take, when these alone are kept."""
        held = self.ahead + self.reserved
        assert not rows or rows[-1] < held, f"row {rows[-1]} kept of {held}"
        for index, row in enumerate(rows):
            if row != index:
                sources.append(self._slot(self.committed + row))
                targets.append(self._slot(self.committed + index))

    def advance(self, rows: int) -> None:
        """Keep the first rows of the speculative region, in their place; see `Ledger.commit`."""
        held = self.reserved  # and what is ahead: nothing in most rounds, and this runs for each sequence in each step
        assert rows <= held or rows <= held + self.ahead, f"{rows} rows kept of {held} reserved"
        self.front = self.committed = self.committed + rows
        self.reserved = 0

    def rollback(self) -> None:
        """Forget the speculative region; its blocks stay for the next one."""
        self.front, self.reserved = self.committed, 0

    def trim(self) -> None:
        """Return blocks after the reserved region (memory is short)."""
        needed = -(-(self.front + self.reserved) // self.pool.block_size)
        while len(self.blocks) > needed:
            self.pool.allocator.free(self.blocks.pop())
            self._slots = None
        self._contiguous = all(b == self.blocks[0] + i for i, b in enumerate(self.blocks))

    def _slot(self, position: int) -> int:
        size = self.pool.block_size
        return self.blocks[position // size] * size + position % size

    def slots(self, start: int, stop: int) -> slice | Tensor:
        """Return the slots of the logical positions start .. stop - 1: a slice where they are contiguous."""
        if self._contiguous:
            base = self.blocks[0] * self.pool.block_size if self.blocks else 0
            return slice(base + start, base + stop)
        if self._slots is None:
            size = self.pool.block_size
            blocks = torch.tensor(self.blocks)[:, None] * size + torch.arange(size)
            self._slots = blocks.reshape(-1).to(self.pool.device)
        return self._slots[start:stop]

    def publish(self, tokens: Sequence[int]) -> None:
        """Make the committed full blocks findable; ``tokens`` are the sequence's, from its first on."""
        size = self.pool.block_size
        if (self._published + 1) * size > self.committed:
            return
        most = self.committed if self.shareable is None else min(self.committed, self.shareable)
        while (self._published + 1) * size <= most:
            start = self._published * size
            self._content = self.pool.allocator.publish(
                self.blocks[self._published], self._content, tokens[start : start + size]
            )
            self._published += 1

    def detach(self) -> None:
        """Drop all blocks without returning them: the pool starts again."""
        self.blocks = []
        self.committed = self.front = self.reserved = 0

    def release(self) -> None:
        """Give all blocks back. Published ones can be found again until they are evicted."""
        for block in reversed(self.blocks):
            self.pool.allocator.free(block)
        self.blocks.clear()
        self.committed = self.front = self.reserved = 0
        self.pool.sequences.discard(self)
