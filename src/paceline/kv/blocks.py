"""Blocks of the pool: free, shared, or cached for a prompt with the same prefix.

    every block is in exactly one state:
        used    refs > 0                     held by one or more sequences
        cached  refs = 0, content published  evictable, least recently used first
        empty   refs = 0, nothing published

A published block is found again by its content: the id of the content before it and its own tokens,
compared exactly (not by a hash, so two prompts can never be confused).
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Sequence

from ..core.errors import PoolFullError

ContentKey = tuple[int, tuple[int, ...]]  # (content id of the previous block, this block's tokens)

ROOT_CONTENT = 0  # content before the first block of every sequence


class BlockAllocator:
    """Allocates blocks, consecutive ones where possible.

    A sequence whose blocks are consecutive is read as one slice, without a gather. So a sequence grows into the block
    after its last one, and a new sequence starts where the most room is.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._refs = [0] * num_blocks
        self._empty = bytearray(b"\x01" * num_blocks)  # 1: empty; searched for long runs
        self.num_empty = num_blocks  # blocks that hold nothing at all
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._content_of: dict[int, tuple[ContentKey, int]] = {}  # block -> its key and content id
        self._block_of: dict[ContentKey, int] = {}
        self._next_content = ROOT_CONTENT + 1

    @property
    def num_free(self) -> int:
        """Return how many blocks can be allocated now: empty and cached ones."""
        return self.num_empty + len(self._cached)

    def allocate(self, after: int | None, want: int | None = None) -> int:
        """Return a block with one reference: the one after the sequence's last, ``after``, if it is free.

        The sequence may grow to ``want`` blocks from here on, where that is known.

        Raises:
            PoolFullError: no block is free.
        """
        if self.num_free == 0:
            raise PoolFullError(f"all {self.num_blocks} blocks of the K/V pool are in use")
        block = self._pick(after, want)
        if self._empty[block]:
            self._empty[block] = 0
            self.num_empty -= 1
        else:
            self._evict(block)
        self._refs[block] = 1
        return block

    def _pick(self, after: int | None, want: int | None) -> int:
        following = -1 if after is None else after + 1
        if self.is_free(following):  # even if that evicts it: a scattered sequence is slow for all its life
            return following
        if self.num_empty:
            return self._roomiest(want)
        return next(iter(self._cached))

    def is_free(self, block: int) -> bool:
        """Return whether a block could be allocated now."""
        return 0 <= block < self.num_blocks and self._refs[block] == 0

    def is_empty(self, block: int) -> bool:
        """Return whether a block could be allocated without evicting anything."""
        return 0 <= block < self.num_blocks and self._empty[block] == 1

    def _roomiest(self, want: int | None) -> int:
        """Return where in the longest empty run a sequence should begin.

        That is the run's start if no block precedes it; else so far back that the preceding sequence can still grow: by
        what this one does not need, or by half.
        """
        run = max(re.finditer(b"\x01+", self._empty), key=lambda match: match.end() - match.start())
        start, stop = run.span()
        if start == 0 or not self._refs[start - 1]:
            return start
        return max(start, stop - (want or (stop - start + 1) // 2))

    def _evict(self, block: int) -> None:
        del self._cached[block]
        key, _ = self._content_of.pop(block)
        del self._block_of[key]

    def share(self, block: int) -> None:
        """Add a reference to a used or cached block."""
        if self._refs[block] == 0:
            del self._cached[block]
        self._refs[block] += 1

    def free(self, block: int) -> None:
        """Remove a reference; without any, a published block stays findable until it is evicted."""
        self._refs[block] -= 1
        if self._refs[block]:
            return
        if block in self._content_of:
            self._cached[block] = None
        else:
            self._empty[block] = 1
            self.num_empty += 1

    def publish(self, block: int, before: int, tokens: Sequence[int]) -> int:
        """Make a full block, with K and V of exactly its ``tokens``, findable after the content ``before``.

        ``before`` is `ROOT_CONTENT` for the first block.

        Returns:
            The content id. Where another block already holds this content, that one stays the one found.
        """
        key = (before, tuple(tokens))
        holder = self._block_of.get(key)
        if holder is not None:
            return self._content_of[holder][1]
        if block in self._content_of:  # cannot hold two contents: positions are written once
            raise AssertionError(f"block {block} is published already")
        content = self._next_content
        self._next_content += 1
        self._block_of[key] = block
        self._content_of[block] = (key, content)
        return content

    def find(self, before: int, tokens: Sequence[int]) -> tuple[int, int] | None:
        """Return (block, content id) of a published block, or None."""
        block = self._block_of.get((before, tuple(tokens)))
        return None if block is None else (block, self._content_of[block][1])

    def forget(self) -> None:
        """Empty every cached block; blocks in use stay published."""
        for block in list(self._cached):
            self._evict(block)
            self._empty[block] = 1
            self.num_empty += 1

    def check_integrity(self, held: Sequence[Sequence[int]]) -> None:
        """Assert that used, cached and empty blocks are all blocks, by every sequence's block table."""
        refs = [0] * self.num_blocks
        for table in held:
            for block in table:
                refs[block] += 1
        assert refs == self._refs, "a block's references differ from the tables that hold it"
        for block in range(self.num_blocks):
            states = (self._refs[block] > 0) + (block in self._cached) + bool(self._empty[block])
            assert states == 1, f"block {block} is in {states} states"
        assert self.num_empty == sum(self._empty)
        assert all(block in self._content_of for block in self._cached)
        assert all(self._content_of[block][0] == key for key, block in self._block_of.items())
