"""A decoder's layers in one call: the compiled counterpart of `layers.Layer.run`.

Used where it can run (float32, bf16, int8 or 4-bit weights on the CPU, SiLU or tanh GELU); everything else runs layer
by layer on torch. Heads and a feed-forward width that are not a multiple of 16 are padded with zeros: these add exactly
0 to every sum.

A row's bits depend on that row and on the keys it sees alone, so what ``exact`` requests holds here at no cost.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import kernels
from ..core.errors import CapabilityError
from ..model.adapters import AdapterRange, LowRank
from ..model.attention.base import AttentionPlan, Segment
from ..model.base import ForwardState, KVCache
from ..model.families import DecoderConfig
from ..model.hot import cut_head
from ..model.padding import SCALE_ROOM, padded
from ..model.rope import RopeTables
from ..weights.blocks import StoredWeights
from . import abi
from .calls import NativeTaps, TokenPass, keys_of, pointer_to
from .linear import BAD_POSITION, NativeAdapters, require
from .weights import Loaded, NativeWeights

ACTIVATIONS = ("silu", "gelu_tanh")  # in the order of `enum Activation`


def unsupported(config: DecoderConfig, dtype: torch.dtype, device: torch.device) -> str | None:
    """Why the compiled layers cannot run this network; None where they can."""
    c = config
    rules = (
        (device.type == "cpu", f"they run on the CPU, not on {device.type}"),
        (dtype in (torch.float32, torch.bfloat16), f"they compute in float32 or bfloat16, not {dtype}"),
        (c.activation in ACTIVATIONS, f"{c.family} has another activation, {c.activation}"),
        (any(c.rotations), f"no layer of {c.family} has rotary positions"),
        (len({rope.dim for rope in c.rotations if rope}) <= 1, f"layers of {c.family} rotate parts of different sizes"),
        (c.num_heads % c.num_kv_heads == 0, f"{c.num_heads} heads cannot share {c.num_kv_heads} of K and V evenly"),
    )
    return next((why for holds, why in rules if not holds), None) or kernels.unavailable()


class Stack:
    """All layers of a decoder and its head, whose weights it takes over, packed; arguments as of `NativeWeights`."""

    def __init__(
        self, decoder: Loaded, stored: StoredWeights | None = None, ends_of: NativeWeights | None = None
    ) -> None:
        c, quant = decoder.local, decoder.quant
        self.dtype = decoder.dtype
        why = unsupported(c, decoder.dtype, decoder.device)
        if quant and decoder.dtype != torch.bfloat16:
            why = why or f"beside {quant} weights they compute in bfloat16, not {decoder.dtype}"
        if why:
            raise CapabilityError("native=True", why, "use native=False")
        self._rope = RopeTables(c.rotations, torch.float32, decoder.device)
        self._quant = quant
        self.weights = NativeWeights(decoder, stored or {}, ends_of)
        self.head = self.weights.head
        self._model = abi.CModel(
            d_model=c.d_model,
            heads=c.num_heads,
            kv_heads=c.num_kv_heads,
            head_dim=padded(c.head_dim),
            own_head_dim=c.head_dim,
            d_ff=padded(c.d_ff),
            rotated=next(rope.dim for rope in c.rotations if rope),
            tokens=c.vocab_size,
            vocab=c.vocab_size,
            wide_activations=decoder.dtype == torch.float32,
            eps=c.norm_eps,
            scale=c.scale,
            activation=ACTIVATIONS.index(c.activation),
            layers=ctypes.addressof(self.weights.layers),
            norm=self.weights.norm,
            head=self.head.struct,
            ranks=None if decoder.ranks is None else ctypes.addressof(decoder.ranks.joins.struct),
        )
        self.reference = ctypes.byref(self._model)
        # By engine, and an engine runs in one thread at a time: two threads never look for the same one.
        self._caches: WeakKeyDictionary[Any, tuple[Any, Any, int, bool]] = WeakKeyDictionary()
        # The cache of the last pass, and what `_pass` keeps for it.
        self._last: tuple[Callable[[], Any], abi.CPass] | None = None
        self._adapters: WeakKeyDictionary[LowRank, NativeAdapters] = WeakKeyDictionary()
        self._packing = threading.Lock()
        self.library = kernels.library()
        self.free_rows = kernels.TILE_ROWS if self.library.isa == kernels.AMX else kernels.VECTOR_ROWS
        self._num_layers, self._embedding = c.num_layers, decoder.embedding.data
        self.embedding_at = ctypes.addressof(self.weights.embedding)
        self._hot: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs of the head and width of states."""
        return self._model.vocab, self._model.d_model

    @property
    def norm_at(self) -> tuple[int | None, float]:
        """Return where the weights of the final norm lie, float32 (None: there is none), and its eps."""
        return self._model.norm, self._model.eps

    def cut(self, hot: Tensor) -> None:
        """Compute the head for the tokens ``hot`` [H] int64, ascending, alone; others have no chance from now on."""
        self.head = self.weights.head = cut_head(self._model, self.head, hot, self.dtype, self._quant)
        self._hot = hot

    def ends(self, hot: Tensor | None) -> abi.CModel:
        """Return the model for calls that read its final norm and head alone: the whole head, or a copy that is cut."""
        if hot is None:
            return self._model
        model = abi.CModel.from_buffer_copy(self._model)
        cut_head(model, self.head, hot, self.dtype)
        return model

    @property
    def weight_bytes(self) -> float:
        """Bytes of one weight of the products, in the mean."""
        products = self.weights.products
        return sum(linear.nbytes for linear in products) / sum(linear.struct.n * linear.struct.k for linear in products)

    def plan(self, segments: Sequence[Segment]) -> AttentionPlan:
        """Return a table of `abi.CSegment`, with addresses in place of tensors.

        Raises:
            ValueError: keys, masks or positions of another shape or dtype than the segment's.
        """
        table = (abi.CSegment * len(segments))()
        held: list[Tensor] = []
        for row, s in zip(table, segments, strict=True):
            row.start, row.stop, row.prefix, row.num_keys = s.start, s.stop, s.prefix, s.num_keys
            block = s.num_keys - s.prefix
            row.base, row.keys = keys_of(s.keys, s.num_keys, held)
            if s.visible is not None:
                row.visible = pointer_to(s.visible, (s.stop - s.start, block), held, torch.bool)
            if s.positions is not None:
                row.block_positions = pointer_to(s.positions, (block,), held)
        return AttentionPlan(segments, table, held)

    def run(self, state: ForwardState, start: int, stop: int, cache: KVCache) -> Tensor:
        """[rows, d_model] after layers start .. stop - 1; ``state.hidden`` is left as it is.

        Rows in ``state.adapters`` get those adapters' deltas. A `LowRank` is packed when it first comes, for as long as
        it lives: its parameters must not change afterwards.

        Raises:
            ConfigError: adapters that are not for this model; see `NativeAdapters`.
            ValueError: a cache, states or a plan of other shapes; slots, keys or positions that are not there; ranges
                of adapters that overlap, are out of order or beyond the rows.
        """
        hidden, plan = self.states(state.hidden), state.attn
        out = torch.empty_like(hidden)
        k, v, stride, packed = self._addresses(cache)
        held: list[Tensor] = []
        run = abi.CPass(
            rows=hidden.shape[0],
            hidden_in=hidden.data_ptr(),
            hidden_out=out.data_ptr(),
            positions=pointer_to(state.positions, hidden.shape[:1], held),
            k_cache=ctypes.addressof(k),
            v_cache=ctypes.addressof(v),
            head_stride=stride,
            packed=packed,
            segments=ctypes.addressof(plan.prepared),
            num_segments=len(plan.prepared),
            threads=torch.get_num_threads(),
            layers=self._num_layers,
        )
        slots = state.slots
        if isinstance(slots, slice):
            run.slot_base = slots.start
        else:
            run.slots = pointer_to(slots, hidden.shape[:1], held)
        if state.adapters:
            table = self._ranges(state.adapters, run.rows)
            run.adapters, run.num_adapters = ctypes.addressof(table), len(table)
        self._rotate(run, self._rope.joined())
        self._call(run, lambda: _highest(state.positions), self.library.pl_run_layers, start, stop)
        return out

    def _call(self, run: abi.CPass, highest: Callable[[], int], function: Any, *arguments: Any) -> None:
        """Compiled code for a pass, and once more with a longer rotation table where positions lie beyond it."""
        refused = function(self.reference, ctypes.byref(run), *arguments)
        if refused == BAD_POSITION:
            run.rotation = None
            self._rotate(run, self._rope.reach(highest()))
            refused = function(self.reference, ctypes.byref(run), *arguments)
        require(refused)

    def decide(self, whole: TokenPass, cache: KVCache, taps: NativeTaps | None = None) -> list[int]:
        """Return the choice after each of the wanted rows of a pass, from token ids on, in one call.

        It gives the same numbers as `run` and `logits`, without a tensor in between; ``taps`` are states that are
        wanted next to the choices.

        Returns:
            The token after each of the wanted rows; -1 where its sampler must choose from the logits: by rules that
            compiled code does not know, or by so little that the last bits of a logarithm count.

        Raises:
            ConfigError, ValueError: as `run`.
        """
        held = list[Any]()
        words = whole.packed(self._model.vocab, held)
        self.choose(self.library.pl_choose, whole, cache, max(whole.positions), words.buffer_info()[0], taps=taps)
        return words[-len(whole.choice_rows) :].tolist() if whole.choice_rows else []

    def choose(
        self, call: Any, whole: TokenPass, cache: KVCache, highest: int, *arguments: Any, taps: NativeTaps | None
    ) -> None:
        """Run a pass from token ids on.

        Args:
            call: an entry point of the library, with its arguments ``arguments``.
            highest: the last position of the pass.
        """
        run, held = self._pass(cache), list[Any]()
        table = None if taps is None else taps.struct(self._model.d_model, self.dtype, held)
        at = None if table is None else ctypes.byref(table)
        run.num_adapters = 0
        if whole.adapters:
            ranges = self._ranges(whole.adapters, len(whole.tokens))
            run.adapters, run.num_adapters = ctypes.addressof(ranges), len(ranges)
        self._call(run, lambda: highest, call, self.embedding_at, *arguments, at)
        if taps is not None and table is not None:
            taps.ms = table.ms

    def _pass(self, cache: KVCache) -> abi.CPass:
        """Return what passes over a cache have in common, kept from pass to pass; with today's rotation and threads."""
        last = self._last
        if last is None or last[0]() is not cache:
            last = self._last = ref(cache), self._new_pass(cache)
        entry = last[1]
        rotation = self._rope.joined()
        if entry.rotation is not rotation:  # if an interrupt ends this, the next call does it again
            entry.rotation = None
            self._rotate(entry, rotation)
            entry.rotation = rotation
        entry.threads = torch.get_num_threads()
        return entry

    def _new_pass(self, cache: KVCache) -> abi.CPass:
        k, v, stride, packed = self._addresses(cache)
        caches = {"k_cache": ctypes.addressof(k), "v_cache": ctypes.addressof(v)}
        entry = abi.CPass(**caches, head_stride=stride, packed=packed, layers=self._num_layers)
        entry.rotation = None
        return entry

    def states(self, hidden: Tensor) -> Tensor:
        """Hidden states [rows, d_model] in one piece."""
        if hidden.dim() != 2 or hidden.shape[1] != self._model.d_model or hidden.dtype != self.dtype:
            expected = f"[rows, {self._model.d_model}] of {self.dtype}"
            raise ValueError(f"hidden states {list(hidden.shape)} of {hidden.dtype}, not {expected}")
        return hidden.contiguous()

    def adapters(self, adapter: LowRank) -> NativeAdapters:
        """One set of adapters in the form that the compiled layers use, made once for all callers."""
        packed = self._adapters.get(adapter)
        if packed is None:
            with self._packing:  # a second one would replace the first while another thread's pass reads that
                packed = self._adapters.get(adapter)
                if packed is None:
                    packed = self._adapters[adapter] = NativeAdapters(adapter, self.weights.linears)
        return packed

    def _ranges(self, ranges: Sequence[AdapterRange], rows: int) -> Any:
        """Return the ranges that hold a row, as the compiled layers read them."""
        table = (abi.CAdapterRange * len(ranges))()
        end = 0
        for entry, r in zip(table, ranges, strict=True):
            if not end <= r.start < r.stop <= rows:
                raise ValueError(f"adapters for rows {r.start} to {r.stop} of {rows}, after others up to row {end}")
            packed, end = self.adapters(r.adapter), r.stop
            entry.start, entry.stop, entry.rank = r.start, r.stop, packed.rank
            entry.adapter = ctypes.addressof(packed.table)
        return table

    def embed(self, tokens: Tensor) -> Tensor:
        """[.., d_model] embeddings of ``tokens`` [..] int64.

        Raises:
            IndexError: one that is none of the vocabulary's.
        """
        if not self._embedding.is_meta:
            return F.embedding(tokens, self._embedding)
        tokens = tokens.contiguous()
        if tokens.numel() and not 0 <= int(tokens.min()) <= int(tokens.max()) < self._model.tokens:
            raise IndexError(f"a token id outside 0 .. {self._model.tokens - 1}")
        out = torch.empty(*tokens.shape, self._model.d_model, dtype=self.dtype)
        self.library.pl_embed(self.reference, self.embedding_at, tokens.data_ptr(), tokens.numel(), out.data_ptr())
        return out

    def final(self, hidden: Tensor) -> Tensor:
        """[rows, d_model]: the final norm."""
        hidden = self.states(hidden)
        out = torch.empty_like(hidden)
        require(self.library.pl_norm(self.reference, hidden.data_ptr(), hidden.shape[0], out.data_ptr()))
        return out

    def logits(self, hidden: Tensor) -> Tensor:
        """[rows, vocab] float32: final norm and head; -inf for tokens that are not hot."""
        hidden = self.states(hidden)
        rows, threads = hidden.shape[0], torch.get_num_threads()
        out = torch.empty(rows, self._model.vocab)
        require(self.library.pl_logits(self.reference, hidden.data_ptr(), rows, out.data_ptr(), threads))
        if self._hot is None:
            return out
        return torch.full((rows, self._model.tokens), -torch.inf).index_copy_(1, self._hot, out)

    def reaching(self, cache: KVCache, last: int) -> abi.CPass:
        """Return a pass without adapters, whose rotation table reaches beyond position ``last``."""
        run = self._pass(cache)
        run.num_adapters = 0
        if last >= run.num_positions:
            run.rotation = None
            self._rotate(run, self._rope.reach(last))
        return run

    @staticmethod
    def _rotate(run: abi.CPass, rotation: tuple[Tensor, Tensor]) -> None:
        cos, sin = run.held = rotation  # kept alive here, since another thread may grow the tables and drop these
        run.cos, run.sin, run.num_positions = cos.data_ptr(), sin.data_ptr(), cos.shape[1]

    def _addresses(self, cache: KVCache) -> tuple[Any, Any, int, bool]:
        """Pointers to every layer's K and V, elements between two heads, and whether rows are packed."""
        addresses = self._caches.get(cache)
        if addresses is None:
            self._check_cache(cache)
            pointers = [(ctypes.c_void_p * len(part))(*(t.data_ptr() for t in part)) for part in (cache.k, cache.v)]
            addresses = pointers[0], pointers[1], cache.k[0].stride(0), cache.k[0].dtype == torch.int8
            self._caches[cache] = addresses
        return addresses

    def _check_cache(self, cache: KVCache) -> None:
        """Refuse what would be read or written beyond its end: compiled code knows a cache by its strides."""
        m, slots = self._model, cache.k[0].shape[1]
        dtype, row = self.dtype, m.head_dim
        if cache.k[0].dtype == torch.int8:
            dtype, row = torch.int8, row + SCALE_ROOM
        shape, strides = (m.kv_heads, slots, row), (slots * row, row, 1)
        if len(cache.k) != self._num_layers or len(cache.v) != self._num_layers:
            raise ValueError(f"a cache of {len(cache.k)} and {len(cache.v)} layers for {self._num_layers}")
        for layer in (*cache.k, *cache.v):
            if layer.dtype != dtype or layer.shape != shape or layer.stride() != strides:
                description = f"{layer.dtype} {list(layer.shape)} in strides of {layer.stride()}"
                raise ValueError(f"a cache of {description} under a model of {dtype} {list(shape)}")


def _highest(positions: Tensor) -> int:
    """Return the largest of the positions [rows].

    Raises:
        ValueError: a negative one.
    """
    lowest, highest = positions.aminmax()
    if lowest < 0:
        raise ValueError(f"negative position {int(lowest)}")
    return int(highest)
