"""A random tiny target in memory, a draft that often agrees with it, and an engine around them: no files.

The weights are scaled so that output varies and a pass rarely repeats a token: random models otherwise
loop, and a test on them tests nothing. The draft is a noised copy of the target.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from types import SimpleNamespace
from typing import Any

import torch

from paceline.draft.base import Drafter
from paceline.draft.draft_model import DraftModel, DraftModelConfig
from paceline.draft.hybrid import Hybrid, HybridConfig
from paceline.draft.registry import DrafterConfig, DrafterContext
from paceline.engine.budget import FixedBudget
from paceline.engine.engine import Engine, EngineLimits
from paceline.engine.rounds import make_round
from paceline.engine.scheduler import SchedulerConfig
from paceline.kv.pool import KVPool
from paceline.model.adapters import AdapterConfig, AdapterRange, LowRank, linear_shapes
from paceline.model.applications import Application
from paceline.model.attention import make_backend
from paceline.model.attention.base import Segment
from paceline.model.attention.sdpa import SdpaAttention
from paceline.model.base import Batch
from paceline.model.decoder import Decoder
from paceline.model.families import DecoderConfig
from paceline.model.linear import Quant
from paceline.model.rope import RopeConfig
from paceline.papers.streaming.application import make_application
from paceline.papers.streaming.drafter import StreamsConfig, StreamsDrafter
from paceline.papers.streaming.model import Mode, StreamConfig, StreamSet

VOCAB = 96
EOS = 7
MAX_POSITION = 512
WINDOW = 24  # sliding window of the middle layer, shorter than the prompts of most tests


def tiny_config(**changes: Any) -> DecoderConfig:
    """Three layers with grouped queries, the middle one with a sliding window; ``changes`` override fields."""
    values: dict[str, Any] = {
        "family": "llama",
        "vocab_size": VOCAB,
        "d_model": 32,
        "d_ff": 48,
        "num_layers": 3,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
        "max_position": MAX_POSITION,
        "norm_eps": 1e-6,
        "eos_ids": (EOS,),
    } | changes
    layers, head_dim = values["num_layers"], values["head_dim"]
    defaults = {"windows": tuple(WINDOW if i == 1 else None for i in range(layers)), "rope": RopeConfig(dim=head_dim)}
    return DecoderConfig(**(defaults | values))


def tiny_decoder(
    config: DecoderConfig | None = None,
    *,
    seed: int = 0,
    noise: float = 0.0,
    dtype: torch.dtype = torch.float64,
    device: str = "cpu",
    exact: bool | None = None,
    quant: Quant | None = None,
    merged: LowRank | None = None,
    compiled: bool = False,
) -> Decoder:
    """A finished decoder with random weights.

    Args:
        config: its shape; default: `tiny_config`.
        seed: of the weights. One seed gives the same weights in every dtype, up to rounding.
        noise: what is added to every weight, as a share of its tensor's standard deviation.
        exact: None: as an `LLM` has it by default, on torch's kernels in less than float64.
        merged: adapters that are added to the weights: W + scale * up down.
        compiled: on the compiled layers (float32 or bf16).
    """
    if exact is None:
        exact = not compiled and dtype != torch.float64
    backend = SdpaAttention(dtype, exact) if exact else make_backend(dtype)
    decoder = Decoder(
        config or tiny_config(), backend, dtype=dtype, device=device, exact=exact, quant=quant, native=compiled
    )
    tiny_weights(decoder, seed, noise)
    if merged is not None:
        _merge(merged, decoder)
    return decoder.finish()


def tiny_weights(decoder: Decoder, seed: int = 0, noise: float = 0.0) -> dict[str, torch.nn.Parameter]:
    """Random weights for a decoder that is not finished; see `tiny_decoder`. Returns its parameters."""
    generator = torch.Generator().manual_seed(seed)
    noises = torch.Generator().manual_seed(seed + 1_000_003)
    for name, parameter in decoder.named_parameters():
        value = _draw(name, parameter.shape, generator)
        if noise:
            value += noise * value.std() * torch.randn(value.shape, generator=noises, dtype=value.dtype)
        parameter.data.copy_(value)
    return dict(decoder.named_parameters())


def _merge(adapter: LowRank, decoder: Decoder) -> None:
    weights = dict(decoder.named_parameters())
    for layer, linear, down, up in adapter.pairs():
        weight = weights[f"layers.{layer}.{linear}.weight"]
        weight.data.copy_(weight.data.double() + adapter.scale * up.data.double() @ down.data.double())


def tiny_adapters(
    config: DecoderConfig | None = None,
    *,
    seed: int = 0,
    rank: int = 4,
    size: float = 0.4,
    dtype: torch.dtype = torch.float64,
    **options: Any,
) -> StreamSet:
    """A set in shared mode without streams, whose adapters change nearly every token.

    Args:
        config: the target's shape; default: `tiny_config`.
        seed: of the adapters.
        rank: of every pair.
        size: of scale * up down, as a share of the deviation of the tiny target's weights.
        dtype: of the parameters.
        options: of `AdapterConfig`; by default every layer and every linear has a pair.
    """
    config = config or tiny_config()
    shapes = linear_shapes(config)
    adapter = AdapterConfig(**{"rank": rank, "alpha": 2.0 * rank, "layers": tuple(range(config.num_layers))} | options)
    made = StreamSet(
        StreamConfig(
            mode="shared",
            gamma=0,
            msa_layers=0,
            num_layers=config.num_layers,
            d_model=config.d_model,
            vocab_size=config.vocab_size,
            prune_rank=0,
            adapter=adapter,
            target="tiny",
        ),
        shapes,
        dtype=dtype,
    )
    assert made.adapters is not None
    generator = torch.Generator().manual_seed(seed)
    made.adapters.start(generator)
    for up in made.adapters.up.values():
        value = torch.randn(up.shape, generator=generator, dtype=torch.float64)
        up.data.copy_(size * 1.5 / adapter.scale * rank**-0.5 * value)
    return made


def tiny_streams(
    config: DecoderConfig | None = None,
    *,
    mode: Mode = "lossless",
    gamma: int = 3,
    layers: int = 1,
    seed: int = 1,
    size: float = 0.3,
    dtype: torch.dtype = torch.float64,
    **options: Any,
) -> StreamSet:
    """A random set of streams: its drafts are right now and then, and its pruning map is no identity.

    Args:
        config: the target's shape; default: `tiny_config`.
        mode, gamma, options: of `StreamConfig`.
        layers: the layers at the top that streams go through.
        seed: of all parameters.
        size: how much they change.
    """
    config = config or tiny_config()
    low = config.num_layers - layers if mode == "lossless" else 0
    made = StreamSet(
        StreamConfig(
            **{"adapter": AdapterConfig(rank=4, layers=tuple(range(low, config.num_layers)))} | options,
            mode=mode,
            gamma=gamma,
            msa_layers=layers,
            num_layers=config.num_layers,
            d_model=config.d_model,
            vocab_size=config.vocab_size,
            target="tiny",
        ),
        linear_shapes(config),
        dtype=dtype,
    )
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in made.tensors().items():
        width = 1 if name == "embeddings" else parameter.shape[-1]
        value = size * width**-0.5 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        parameter.data.copy_(value)
    return made


def streams(
    *, target: dict[str, Any] | None = None, trained: StreamSet | None = None, **options: Any
) -> StreamsDrafter:
    """A `StreamsDrafter` over `tiny_streams`.

    Args:
        target: ``config`` and ``dtype`` of the target.
        trained: the set; default: `tiny_streams`.
        options: of `StreamsConfig`.
    """
    return StreamsDrafter(StreamsConfig(**options), trained or tiny_streams(**(target or {})))


def tiny_application(name: str, decoder: Decoder, trained: StreamSet | None = None, **options: Any) -> Application:
    """An application over a tiny target.

    Args:
        name: its name; its identity, too.
        decoder: the target.
        trained: the set; default: `tiny_adapters` with ``options``.
    """
    trained = trained or tiny_adapters(decoder.config, dtype=decoder.dtype, **options)
    return make_application(name, trained, decoder, identity=name)


def _draw(name: str, shape: Sequence[int], generator: torch.Generator) -> torch.Tensor:
    normal = torch.randn(*shape, generator=generator, dtype=torch.float64)
    if "norm" in name:
        return 1 + 0.3 * normal.clamp(-2, 2)
    if len(shape) == 1:
        return 0.3 * normal
    scale = {"embedding": 0.2, "head.weight": 4 * shape[-1] ** -0.5}.get(name, 1.5 * shape[-1] ** -0.5)
    return scale * normal


def draft_model(*, noise: float = 0.03, target: dict[str, Any] | None = None, **options: Any) -> DraftModel:
    """A `DraftModel` over a noised copy of the target.

    Args:
        noise: how far it is from the target.
        target: arguments of `tiny_decoder` that the target was built with.
        options: of `DraftModelConfig`.
    """
    decoder = tiny_decoder(**{**(target or {}), "noise": noise, "exact": False})
    loaded = SimpleNamespace(decoder=decoder, tokenizer=None, name="tiny-draft", folder=None)
    return DraftModel(DraftModelConfig(model="tiny-draft", **options), loaded)


LOOKUP, MODEL = "suffix;depth=6;max_tokens=0", "draft_model:tiny-draft;depth=4"


def hybrid(
    parts: str = f"{LOOKUP}+{MODEL}", *, noise: float = 0.03, target: dict[str, Any] | None = None, **options: Any
) -> Hybrid:
    """A `Hybrid` whose draft models are noised copies of the target.

    Args:
        parts: its drafters.
        noise, target: as for `draft_model`.
        options: of `HybridConfig`.
    """
    decoder = tiny_decoder(**{**(target or {}), "noise": noise, "exact": False})
    loaded = SimpleNamespace(decoder=decoder, tokenizer=None, name="tiny-draft", folder=None)
    context = DrafterContext(load_model=lambda name, dtype: loaded, dtype=decoder.dtype, device=decoder.device)
    return HybridConfig(parts=parts, **options).build(context)


def hybrid_with_streams(
    parts: str = LOOKUP, *, k: int = 12, noise: float = 0.03, target: dict[str, Any] | None = None, **options: Any
) -> Hybrid:
    """A `Hybrid` of other drafters and, last, a `StreamsDrafter` over `tiny_streams`.

    Args:
        parts: the other drafters.
        k: tokens of each stream.
        noise, target: as for `hybrid`.
        options: of `HybridConfig`.
    """
    others = hybrid(parts, noise=noise, target=target)
    config = HybridConfig(parts=f"{parts}+streams;k={k};nodes=24", **options)
    return Hybrid(config, [*others.parts, streams(target=target, k=k, nodes=24)])


def full_logits(decoder: Decoder, tokens: Sequence[int], adapter: LowRank | None = None) -> torch.Tensor:
    """[tokens, V]: the whole text in one causal pass over fresh K/V."""
    count = len(tokens)
    cache = KVPool(*decoder.cache_shape, count, decoder.dtype, decoder.device)
    places, whole = torch.arange(count), slice(0, count)
    segment = Segment(0, count, whole, count, 0, None, None)
    batch = Batch(torch.tensor(tokens), places, whole, decoder.plan([segment], places))
    with torch.inference_mode():
        state = decoder.embed(batch)
        state.adapters = [] if adapter is None else [AdapterRange(0, count, adapter)]
        return decoder.logits(decoder.run_layers(state, 0, decoder.num_layers, cache))


def piece(token: int) -> str:
    """The text of one id: a letter and a digit, such as ``c4``; EOS has none."""
    return "" if token == EOS else f"{chr(97 + token // 10)}{token % 10}"


def holds_back(token: int) -> bool:
    """Whether the text of this id comes out together with the next one's (as half a character would)."""
    return token % 11 == 5


class ToyText:
    """The text of an answer, from `piece`."""

    sure = True

    def __init__(self) -> None:
        self._held = ""

    def push(self, token: int) -> str:
        text = self._held + piece(token)
        self._held = text if holds_back(token) else ""
        return "" if holds_back(token) else text

    def end(self) -> str:
        return ""


class ToyTexts:
    """The engine's ``texts``: ids have the text of `piece`."""

    def stream(self, prompt_ids: Sequence[int], skip_special_tokens: bool) -> ToyText:
        return ToyText()

    def prompt(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        return "".join(map(piece, ids))

    @staticmethod
    def token(token: int) -> str:
        return piece(token)


TOY_TEXTS = ToyTexts()


def assemble(
    drafter: Drafter | DrafterConfig | None = None,
    *,
    round: str = "auto",  # noqa: A002  (the name that users know)
    verifier: str = "sample_and_match",
    budget: int | None = None,
    kv_tokens: int = 4096,
    block_size: int = 16,
    max_batch_rows: int = 512,
    max_sequences: int = 64,
    max_model_len: int = MAX_POSITION,
    exact: bool = False,
    dtype: torch.dtype = torch.float64,
    device: str = "cpu",
    decoder: Decoder | None = None,
    texts: Any = TOY_TEXTS,
    applications: Sequence[Application] = (),
    **limits_of_a_step: Any,
) -> Engine:
    """An engine over a tiny target.

    Args:
        drafter: a drafter, the config of one that needs no model, or None for plain decoding.
        budget: drafted nodes a step; default: the drafter's own size.
        kv_tokens: slots of the target's pool.
        decoder: the target; default: `tiny_decoder` with ``dtype``, ``device`` and ``exact``.
        texts: see `Engine`; None for a model without a tokenizer.
        applications: over ``decoder``.
        limits_of_a_step: other fields of `SchedulerConfig`.
    """
    decoder = decoder or tiny_decoder(dtype=dtype, device=device, exact=exact)
    shape = decoder.config
    if isinstance(drafter, DrafterConfig):
        drafter = drafter.build(DrafterContext(load_model=None, dtype=decoder.dtype, device=decoder.device))
    pool = KVPool(
        *decoder.cache_shape,
        kv_tokens,
        decoder.dtype,
        decoder.device,
        block_size,
        scratch_slots=_scratch(drafter, applications, max_batch_rows, max_sequences),
    )
    if drafter is not None:
        drafter.bind(decoder.info("tiny"), max_sequences, pool.num_tokens, decoder.device)
    size = budget if budget is not None else drafter.spec.default_budget if drafter is not None else 0
    limits = EngineLimits(vocab_size=shape.vocab_size, max_model_len=max_model_len, eos_ids=shape.eos_ids)
    return Engine(
        make_round(round, target=decoder, pool=pool, drafter=drafter, verifier=verifier),
        pool,
        limits,
        SchedulerConfig(max_sequences=max_sequences, max_batch_rows=max_batch_rows, **limits_of_a_step),
        FixedBudget(size, why="no drafter was named" if drafter is None else "budget=0"),
        texts,
        {application.name: application for application in applications},
    )


def _scratch(drafter: Drafter | None, applications: Sequence[Application], rows: int, sequences: int) -> int:
    """Slots for drafts and streams, as few as an `LLM` takes."""
    if drafter is None:
        return 0
    return max(drafter.scratch_slots(rows, sequences), *(rows * a.rows for a in applications), 0)


def ids(outputs: Iterable[Any]) -> list[list[int]]:
    """Return the token ids of the first sample of each output."""
    return [output.outputs[0].token_ids for output in outputs]


def random_prompts(count: int, seed: int = 0, low: int = 3, high: int = 40) -> list[list[int]]:
    """Prompts of random lengths, without the first ten ids."""
    draw = torch.Generator().manual_seed(seed)
    sizes = torch.randint(low, high + 1, (count,), generator=draw).tolist()
    return [torch.randint(10, VOCAB, (size,), generator=draw).tolist() for size in sizes]


_ALONE: dict[Any, Any] = {}


def alone(decoder: Decoder, jobs: Sequence[tuple[Sequence[int], Any]]) -> list[Any]:
    """Answer each (prompt ids, params) in an engine of its own without a drafter; each once in a run of the tests."""
    for ids, params in jobs:
        if (decoder, *ids, params) not in _ALONE:
            [_ALONE[decoder, *ids, params]] = run(assemble(decoder=decoder), [(ids, params)])
    return [_ALONE[decoder, *ids, params] for ids, params in jobs]


def run(
    engine: Engine, requests: Sequence[tuple[Sequence[int], Any]], applications: Sequence[str | None] | None = None
) -> list[Any]:
    """Submit (prompt ids, params) together and step until all are answered; outputs in their order.

    Args:
        applications: one a request; default: the base model for all.
    """
    names = applications or [None] * len(requests)
    order = [engine.submit(ids, params, application=name) for (ids, params), name in zip(requests, names, strict=True)]
    done: dict[str, Any] = {}
    while engine.busy:
        for live in engine.step():
            if live.finished:
                done[live.id] = engine.output(live)
    engine.pool.check_integrity()
    return [done[request_id] for request_id in order]
