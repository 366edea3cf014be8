"""Medusa's heads in one compiled call: final norm, blocks, output heads and the best tokens of each."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence

import torch
from torch import Tensor

from .. import native
from ..native import abi
from .native import Stack
from .native_linear import NativeLinear, require


class NativeHeads:
    """Heads over a target's compiled layers.

    Args:
        stack: of the target, whose final norm and, where the heads have none, output head are used.
        matrices: [heads * d_model, d_model] of the blocks, one below the other.
        bias: [heads, d_model] of them.
        own: [heads, vocab, d_model] output heads; None: the target's serves all.
        hot: [H] int64, the only tokens that the target's head is computed for; None: all.

    Raises:
        ValueError: shapes that are not the target's.
    """

    def __init__(
        self, stack: Stack, matrices: Tensor, bias: Tensor, own: Tensor | None = None, hot: Tensor | None = None
    ) -> None:
        self.stack, self.count = stack, len(bias)
        vocab, width = stack.shape
        if matrices.shape != (self.count * width, width) or (own is not None and own.shape[1:] != (vocab, width)):
            raise ValueError(f"heads of other shapes than a target of width {width} with {vocab} tokens has")
        self.blocks = NativeLinear(matrices.to("cpu", stack.dtype), bias.flatten())
        self.own = [NativeLinear(part.to("cpu", stack.dtype), None) for part in own] if own is not None else []
        self._table = (abi.CLinear * len(self.own))(*[linear.struct for linear in self.own])
        own_at = ctypes.addressof(self._table) if self.own else None
        self._struct = abi.CHeads(count=self.count, blocks=self.blocks.struct, own=own_at)
        self._reference = ctypes.byref(self._struct)
        self._ends, self._hot = stack.ends(hot)

    def best(
        self, states: Tensor, k: int, positions: Sequence[int], rules: bytes | None = None, noisy: bool = False
    ) -> list[tuple[list[list[int]], list[list[float]]]]:
        """The k best tokens of every head behind every state, best first, and their log-probabilities.

        Args:
            states: [rows, d_model] before the final norm.
            k: at most the vocabulary.
            positions: [rows] of the first head's tokens.
            rules: `SequenceSampler.rules` of every row in a row; None: by the logits alone.
            noisy: by logits with the noise of the sequence's own choices.

        Returns:
            For each row [heads][k] tokens and their log-probabilities by these rules.
        """
        states = self.stack.states(states)
        rows, size = len(states), len(states) * k
        places = array("q", positions)
        tokens, log_q = array("q", bytes(8 * size * self.count)), array("f", bytes(4 * size * self.count))
        if len(places) != rows or (rules is not None and len(rules) != native.RULES_BYTES * rows):
            raise ValueError(f"{len(places)} positions and {len(rules or b'')} bytes of rules for {rows} states")
        out = tokens.buffer_info()[0], log_q.buffer_info()[0], torch.get_num_threads()
        given = states.data_ptr(), rows, k, rules, places.buffer_info()[0], int(noisy)
        require(self.stack.library.pl_heads(ctypes.byref(self._ends), self._reference, *given, *out))
        starts = [[head * size + row * k for head in range(self.count)] for row in range(rows)]
        return [([tokens[i : i + k].tolist() for i in own], [log_q[i : i + k].tolist() for i in own]) for own in starts]
