"""The network: embed, run any range of layers, logits. One class for every family in `families`.

Written for few rows on a CPU, where an elementwise operation takes about as long as its call from Python: a layer is as
few calls as the arithmetic allows.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..core.errors import CapabilityError, ConfigError
from ..kernels.layers import Stack
from ..weights.blocks import BY_NAME, StoredWeights
from .adapters import LINEARS, AdapterRange
from .attention.base import AttentionBackend, Segment
from .base import Batch, ForwardState, KVCache, Taps
from .families import DecoderConfig, linear_shapes
from .handle import TargetHandle
from .hot import masked
from .layers import Layer, Norm
from .linear import Dense, LinearOp, Quant, RowBlocks, make_linear, nan_parameter
from .padding import cache_shape
from .parallel import BEST, LOGITS, NORMED, Ranks, Run
from .rope import RopeTables

log = logging.getLogger(__name__)


class Decoder(nn.Module):
    """A decoder-only transformer whose layers can be run in any ranges.

    The parameters hold NaN until they are loaded. `finish` then checks that none is left and turns the
    weights into the fastest form for their device; after it the module is for inference only.

    Args:
        dtype: of weights, activations and cache.
        exact: a row's bits depend on nothing but its own input: not on the number of rows in the pass,
            nor on its place among them.
        quant: how the weights of the linear layers and of the head are stored; None: as ``dtype``.
        native: run the layers in compiled code (see `kernels.layers.Stack`); ``attention`` is then not used.
        lender: whose embedding, final norm and head this network uses in place of own ones: a drafter's layers over
            its target's. Of the same width, vocabulary and dtype.
        normed: next to a lender: the layers give normed states, which its head reads as they are.
        ranks: of which this is one: parameters and cache are its share, and it computes with the others.

    Raises:
        CapabilityError: compiled layers where the lender has none, or a lender of other shapes.
    """

    def __init__(
        self,
        config: DecoderConfig,
        attention: AttentionBackend,
        *,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        exact: bool = False,
        quant: Quant | None = None,
        native: bool = False,
        ends_of: TargetHandle | None = None,
        normed: bool = False,
        ranks: Ranks | None = None,
    ) -> None:
        super().__init__()
        self.config, self.ranks = config, ranks
        self.local = here = config if ranks is None else ranks.share.local  # this rank's part
        self.lender, self.normed = ends_of, normed
        if ends_of is not None:
            _check_lender(ends_of, config, dtype, native)
        self.num_layers = config.num_layers
        self.attention = attention
        self.dtype, self.device = dtype, torch.device(device)
        self.exact, self.quant = exact, quant
        owns_ends = ends_of is None
        shape = (here.vocab_size, config.d_model)
        # Weights that a file has in blocks are never here as a whole: `finish` is given them.
        weights = torch.device("meta") if quant == "stored" else self.device
        self.embedding = nan_parameter(shape, dtype, weights) if ends_of is None else ends_of.embedding
        self.layers = nn.ModuleList(
            Layer(here, i, dtype, self.device, exact, weights, ranks) for i in range(config.num_layers)
        )
        self.norm = Norm(config, dtype, self.device) if owns_ends else None
        has_head = owns_ends and not config.tied
        self.head = Dense(config.d_model, here.vocab_size, False, dtype, weights) if has_head else None
        self.windows = frozenset(config.windows)
        self._rope = RopeTables(config.rotations, dtype, self.device)
        self._run: list[Any] = [*self.layers]  # an nn.ModuleList is slow to index
        for layer, table in zip(self._run, self._rope.of_layer, strict=True):
            layer.table = table
        self._head: LinearOp | None = None
        self._native = native
        self.stack: Stack | None = None  # the compiled layers, where they run this network
        self._hot: Tensor | None = None  # the only tokens with a chance, where `stack` does not see to that; None: all

    def in_order(self) -> list[Layer]:
        """Return the layers of a pass."""
        return self._run

    def allocate(self, stored: Collection[str]) -> None:
        """Give memory to the weights that `finish` will not be given in blocks; without such there is nothing to do."""
        for name, value in [*self.named_parameters()]:
            if value.is_meta and name not in stored:
                module, _, leaf = name.rpartition(".")
                setattr(self.get_submodule(module), leaf, nan_parameter(tuple(value.shape), value.dtype, self.device))

    def assert_loaded(self) -> None:
        """Raise ConfigError where a parameter still holds NaN."""
        unloaded = [name for name, value in self.named_parameters() if not value.is_meta and value.isnan().any()]
        if unloaded:
            more = f" and {len(unloaded) - 3} more" if len(unloaded) > 3 else ""
            raise ConfigError(
                "the model's weights",
                f"{', '.join(unloaded[:3])}{more} hold NaN: not loaded, or broken in the checkpoint",
                "restore the checkpoint",
            )

    def finish(self, stored: StoredWeights | None = None) -> Decoder:
        """Check that everything is loaded and turn the weights into their fastest form, one at a time.

        Packed and int8 weights replace the plain ones. A tied head is packed next to the embedding table, which the
        look-up needs as it is: vocab_size * d_model elements are then held twice, but where it is in blocks: ``stored``
        has such weights by the parameter's name.
        """
        self.assert_loaded()
        if self._native:
            ends_of = None if self.lender is None or self.lender.stack is None else self.lender.stack.weights
            self.stack = Stack(self, stored, ends_of)
            self._head = self.stack.head
            self.head = None
            return self
        for layer in self._run:
            layer.finish(self.quant)
        if self.norm is None:
            return self
        self.norm.finish()
        weight = self.embedding if self.head is None else self.head.weight
        self._head = make_linear(weight.data, None, exact=self.exact, quant=self.quant)
        self.head = None
        self.scale_embedding()
        products = [self._head, *(getattr(layer, name) for layer in self._run[:1] for name in LINEARS)]
        steps = [product.step for product in products if isinstance(product, RowBlocks) and product.step > 1]
        if steps:
            log.warning(
                "torch's kernels give a row other bits in a pass of other width: %d of %d products compute rows by %d, "
                "so that no draft changes an answer; exact=False (--no-exact) takes their fastest products",
                *(len(steps), len(products), max(steps)),
            )
        return self

    def cut(self, hot: Tensor | None) -> None:
        """Give no chance to tokens other than ``hot`` [H] int64, ascending (`model.hot`); None: to all.

        It is called once, after `finish`.
        """
        if hot is not None and self.stack is not None:
            self.stack.cut(hot)
            self._head = self.stack.head
        else:
            self._hot = hot

    def scale_embedding(self) -> None:
        """Scale the table of embeddings, once for all who look tokens up. A tied head is made of it before."""
        if self.lender is None and self.config.embedding_scale != 1:
            factor = torch.tensor(self.config.embedding_scale, dtype=torch.float32)
            self.embedding.data = self.embedding.data * factor.to(self.dtype)

    @property
    def pass_bytes(self) -> int:
        """Bytes of weights that one forward pass reads: the linear layers and the head."""
        c = self.local
        layer = sum(inputs * outputs for inputs, outputs in linear_shapes(c).values())
        return round(self.weight_bytes * (c.num_layers * layer + c.vocab_size * c.d_model))

    @property
    def weight_bytes(self) -> float:
        """Bytes of one weight of the linear layers, its share of scales included."""
        if self.quant is None:
            return self.dtype.itemsize
        if self.quant == "stored":
            assert self.stack is not None, "the compiled layers alone hold blocks"
            return self.stack.weight_bytes
        return 1.0 if self.quant == "int8" else BY_NAME[self.quant].bytes / BY_NAME[self.quant].values

    @property
    def cache_shape(self) -> tuple[int, int, int]:
        """Layers, K/V heads and a head's width of the cache that it reads and writes."""
        return cache_shape(self.local, self._native)

    @property
    def head_product(self) -> LinearOp:
        """Return the product of the output head."""
        if self._head is None:
            raise RuntimeError("the decoder was not finished: call finish() once its weights are loaded")
        return self._head

    def handle(self) -> TargetHandle:
        """Embedding, final norm and head, for those that borrow them.

        Raises:
            RuntimeError: `finish` was not called, or they are borrowed.
        """
        if self.norm is None:
            raise RuntimeError("embedding, norm and head of this decoder belong to another one: share that one's")
        norm, embedding, stack = self.norm if self.stack is None else self.stack.final, self.embedding.data, self.stack
        if self.ranks is not None:  # of both ends each rank has a part
            stack, embedding = None, embedding.new_empty((self.config.vocab_size, self.config.d_model), device="meta")
        return TargetHandle(embedding, self.embed_tokens, norm, self.read_normed, stack)

    def info(self, name: str, tokenizer: Any = None) -> TargetInfo:
        """Return what a drafter may know."""
        return TargetInfo.of(name, self.config, self.dtype, tokenizer, self)

    def plan(self, segments: Sequence[Segment], positions: Tensor) -> Any:
        """Return the attention plan for rows at ``positions`` [rows] int64, with this network's sliding windows."""
        if self.stack is not None:
            return self.stack.plan(segments)
        return self.attention.plan(segments, positions, self.windows)

    def whole_run(
        self, batch: Batch, cache: KVCache, read: int, choice_rows: Sequence[int], adapters: Sequence[AdapterRange] = ()
    ) -> AbstractContextManager[None]:
        """Return what a pass over all layers is inside of, so that other ranks learn of it at once.

        The pass goes from `embed` to `best` or ``read`` of the rows ``choice_rows``.
        """
        if self.ranks is None:
            return nullcontext()

        def run() -> Run:
            places: dict[str, Any] = {"positions": batch.positions, "slots": batch.slots}
            places |= {"segments": batch.attn.segments, "layers": (0, self.num_layers)}
            return Run(tokens=batch.tokens, **places, read=read, choice_rows=[*choice_rows])

        return self.ranks.together(run, cache, adapters)

    def embed(self, batch: Batch) -> ForwardState:
        """Token embeddings: [rows, d_model]."""
        hidden = self.embed_tokens(batch.tokens)
        state = ForwardState(hidden, batch.positions, batch.slots, batch.attn)
        if self.stack is None:
            self._rotations(state)
        return state

    def embed_tokens(self, tokens: Tensor) -> Tensor:
        """[rows, d_model] of ``tokens`` [rows] int64: what the first layer reads."""
        if self.ranks is not None:
            with self.ranks.together(lambda: Run(tokens=tokens)):
                return self.ranks.embedded(tokens, self.embedding.data)
        if self.stack is not None:
            return self.stack.embed(tokens)
        return F.embedding(tokens, self.embedding) if self.lender is None else self.lender.embed(tokens)

    def run_layers(
        self, state: ForwardState, start: int, stop: int, cache: KVCache, taps: Taps | None = None
    ) -> ForwardState:
        """Run layers start .. stop - 1 in place on ``state``; K and V of every row go to its slot.

        A tap is the tensor that the next layer reads. Layers never write to their input, so it is not changed.
        """
        if self.ranks is None or start == stop:
            return self._run_own(state, start, stop, cache, taps)
        places: dict[str, Any] = {"positions": state.positions, "slots": state.slots, "segments": state.attn.segments}
        hidden = state.hidden
        with self.ranks.together(lambda: Run(hidden=hidden, **places, layers=(start, stop)), cache, state.adapters):
            exact = None if self.stack is not None else self.exact
            rank_state = replace(state, adapters=self.ranks.adapters(state.adapters, exact))
            state.hidden = self._run_own(rank_state, start, stop, cache, taps).hidden
        return state

    def _run_own(self, state: ForwardState, start: int, stop: int, cache: KVCache, taps: Taps | None) -> ForwardState:
        """`run_layers` with the weights that are here."""
        if self.stack is not None:
            return self._run_native(self.stack, state, start, stop, cache, taps)
        hidden, attention = state.hidden, self.attention
        rotations = self._rotations(state)
        for index in range(start, stop):
            layer = self._run[index]
            hidden = layer.run(hidden, state, rotations[layer.table], cache.k[index], cache.v[index], attention)
            if taps is not None:
                self._tap(taps, index, hidden)
        state.hidden = hidden
        return state

    def _run_native(
        self, stack: Stack, state: ForwardState, start: int, stop: int, cache: KVCache, taps: Taps | None
    ) -> ForwardState:
        """One call, or one up to each tap."""
        tapped = [] if taps is None else [name % self.num_layers + 1 for name in taps.layers]
        for end in sorted({*(t for t in tapped if start < t < stop), stop}):
            if end > start:
                state.hidden = stack.run(state, start, end, cache)
                if taps is not None:
                    self._tap(taps, end - 1, state.hidden)
            start = end
        return state

    def logits(self, state: ForwardState, rows: Tensor | None = None) -> Tensor:
        """[rows, vocab], float32 or wider: final norm and output head of the rows named (all by default)."""
        return self.read(state.hidden if rows is None else state.hidden[rows])

    def read(self, hidden: Tensor) -> Tensor:
        """[rows, vocab], float32 or wider: final norm and output head of any hidden states [rows, d_model]."""
        if self.ranks is None:
            logits = self._read_own(hidden)
        else:
            with self._reading(self.ranks, hidden, LOGITS):
                logits = self.ranks.logits(self._read_own(hidden))
        return logits if self._hot is None else masked(logits, self._hot)

    def read_normed(self, states: Tensor) -> Tensor:
        """Return [rows, vocab], float32 or wider, of states [rows, d_model] that went through the final norm."""
        if self.ranks is None:
            return self.head_product.wide(states)
        with self._reading(self.ranks, states, NORMED):
            return self.ranks.logits(self.head_product.wide(states))

    def best(self, hidden: Tensor) -> Tensor:
        """[rows] int64: the first of the likeliest tokens after any hidden states [rows, d_model]."""
        if self.ranks is None:
            return likeliest(self.read(hidden))
        with self._reading(self.ranks, hidden, BEST):
            part = self._read_own(hidden)
            return self.ranks.best(part, likeliest(part))

    @staticmethod
    def _reading(ranks: Ranks, hidden: Tensor, read: int) -> AbstractContextManager[None]:
        return ranks.together(lambda: Run(hidden=hidden, read=read)) if len(hidden) else nullcontext()

    def _read_own(self, hidden: Tensor) -> Tensor:
        """[rows, tokens that are here] of any hidden states."""
        if self.stack is not None:
            return self.stack.logits(hidden)
        if self.norm is None:
            assert self.lender is not None, "no norm of its own"
            logits = self.lender.logits(hidden, self.normed)
        else:
            logits = self.head_product(self.norm(hidden))  # [rows, vocab]
        return logits if logits.dtype == torch.float64 else logits.float()

    def _rotations(self, state: ForwardState) -> list[tuple[Tensor, Tensor] | None]:
        """Return, for each table, cos and signed sin [rows, 1, dim] of the state's rows, looked up once a pass."""
        if self not in state.rope:
            state.rope[self] = self._rope.rows(state.positions)
        return state.rope[self]

    def _tap(self, taps: Taps, index: int, hidden: Tensor) -> None:
        for name in taps.layers:
            if name == index or name == index - self.num_layers:
                taps.hidden[name] = hidden


def likeliest(logits: Tensor) -> Tensor:
    """[rows] int64: the first of the largest logits of each row [rows, V]."""
    if logits.device.type == "cpu":  # numpy's takes a quarter of the time of torch's, which would wake the threads
        return torch.from_numpy(logits.numpy().argmax(axis=-1))
    return logits.max(dim=-1).indices


@dataclass(frozen=True, slots=True)
class TargetInfo:
    """Describe what a drafter may know about the target before the first forward pass."""

    name: str
    num_layers: int
    d_model: int
    vocab_size: int
    max_position: int
    dtype: torch.dtype
    eos_ids: tuple[int, ...]
    bos_id: int | None
    tokenizer: Any  # the Hugging Face tokenizer, or None for a model without one
    handle: TargetHandle  # the target's embedding, final norm and head, for drafters that work on its states
    decoder: Decoder  # the target itself, for drafters that draft with its layers

    @staticmethod
    def of(
        name: str, config: DecoderConfig, dtype: torch.dtype, tokenizer: Any, decoder: Decoder | None = None
    ) -> TargetInfo:
        """Describe a target by its configuration.

        Without a decoder (the target is in another process) ``handle`` and ``decoder`` are None.
        """
        shared = ("num_layers", "d_model", "vocab_size", "max_position", "eos_ids", "bos_id")
        fields_given: dict[str, Any] = {field: getattr(config, field) for field in shared}
        fields_given |= {"handle": None if decoder is None else decoder.handle(), "decoder": decoder}
        return TargetInfo(name=name, dtype=dtype, tokenizer=tokenizer, **fields_given)


def _check_lender(ends_of: TargetHandle, config: DecoderConfig, dtype: torch.dtype, native: bool) -> None:
    """Refuse to borrow from a network of another shape or kind."""
    shape = tuple(ends_of.embedding.shape)
    subject = f"layers of width {config.d_model} in {dtype} over the embedding and head of a target"
    if shape != (config.vocab_size, config.d_model) or ends_of.dtype != dtype:
        wrong = f"its embedding is {list(shape)} in {ends_of.dtype}, not {[config.vocab_size, config.d_model]}"
        raise CapabilityError(subject, wrong, "use layers that were trained for this target")
    if native and ends_of.stack is None:
        raise CapabilityError(f"compiled {subject}", "the target runs on torch's kernels", "use native=False")
