"""From a configuration to an engine: target, pool, drafter, budget and round, each by a function of its own.

No part keeps a reference to the object that asked for it, so that another process can build its part from the same
configuration.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from . import zoo
from .attention import make_backend
from .attention.base import AttentionBackend
from .config import AUTO_COSTS, TARGET_OPTIONS, LLMConfig, parse_bytes
from .core.errors import CapabilityError, ConfigError
from .core.model_spec import parse_model
from .drafters import registry
from .drafters.base import Drafter
from .drafters.registry import DrafterConfig, DrafterContext
from .drafters.sessions import GoingSessions
from .engine import calibration
from .engine.auto import AutoBudget
from .engine.budget import AUTO, DraftBudget, FixedBudget, parse_budget
from .engine.calibration import Fingerprint
from .engine.costs import CostTable, cost_points
from .engine.engine import Engine, EngineLimits
from .engine.scheduler import SchedulerConfig, parse_prompt_rows
from .engine.tokens import texts_of
from .grammar import Grammars
from .kv.pool import KVPool
from .network.applications import Application, load_applications, locate
from .network.decoder import Decoder
from .network.devices import share_devices
from .network.families import DecoderConfig
from .network.files import free_bytes, is_file
from .network.gguf import is_gguf
from .network.linear import Quant
from .network.loader import (
    load_model,
    load_tokenizer,
    load_vocabulary,
    parse_device,
    parse_dtype,
    read_config,
    resolve_folder,
)
from .network.native import unsupported
from .network.padding import cache_shape, packed_shape
from .network.parallel import Ranks, Share, by_outputs
from .network.streams import CONFIG_FILE
from .network.tracks import Tracks, load_tracks
from .planning import machines
from .planning.models import shape_of
from .planning.throughput import ServedModel, pass_seconds
from .rounds import make_round, parse_round, round_of
from .rounds.base import Origin, Place
from .rounds.pipeline import PipelineConfig
from .rounds.pipeline.split import Split, parse_split
from .rounds.pipeline.stage_line import StageLine

DEFAULT_KV_BYTES = 512 * 2**20


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A decoder with its tokenizer."""

    name: str
    decoder: Decoder
    tokenizer: Any  # None for a folder without one
    folder: Path
    layers: int  # of the whole target, of which the decoder may have the last ones alone


@dataclass(frozen=True, slots=True)
class TargetPart:
    """What a process, or all ranks of one, have of a target."""

    layers: tuple[int, int] | None = None  # the first, and one past the last; None: all
    ends: bool = True  # whether embedding, final norm and head are there, too


# Starts the processes of a target's ranks: rank 0, with the line to the others.
StartRanks = Callable[[LLMConfig, "Source", TargetPart], Ranks]

# Starts the processes of a draft's tracks, likewise.
StartTracks = Callable[[LLMConfig, "Source"], Ranks]


def load_target(config: LLMConfig, start: StartRanks | None = None) -> LoadedModel:
    """The target. Everything that can be checked without the weights is checked before they are read.

    Args:
        config: the options.
        start: starts its other ranks, where it has some.
    """
    source = open_source(config, config.model, config.dtype)
    if source.shape.tracks > 1:
        wrong = "it is a draft of tracks, which no target is"
        raise CapabilityError(f"model {config.model!r}", wrong, f"draft with it: drafter='draft_model:{config.model}'")
    drafter_of(config)
    _pool_tokens(config, *kv_layout(config, source.shape, source.dtype), _max_model_len(config, source.shape))
    locate(config.applications or {}, config.offline)
    layers = own_layers(config, source.shape)
    if config.tensor_parallel > 1:
        share_of(config, source, 0)
        assert start is not None, "nobody starts the other ranks"
        tokenizer = source.tokenizer()
        decoder = load_ranks(config, source, TargetPart(layers), start)
        return LoadedModel(source.name, decoder, tokenizer, source.folder, source.shape.num_layers)
    return _load(config, source, config.exact, layers)


def load_ranks(config: LLMConfig, source: Source, part: TargetPart, start: StartRanks) -> Decoder:
    """Rank 0's share of a part of the target, while the other ranks load theirs; errors as of `load_model`."""
    ranks = start(config, source, part)
    decoder = load_share(config, source, ranks, part)
    assert ranks.line is not None, "rank 0 has the line to the others"
    ranks.line.start()
    return decoder


def share_of(config: LLMConfig, source: Source, rank: int, part: TargetPart = TargetPart()) -> Share:  # noqa: B008  # frozen
    """What one rank has of the target, or of a part of it.

    Raises:
        ConfigError: ranks that cannot share it.
        CapabilityError: ``exact`` on layers that torch runs, or a target that is not cut.
    """
    count = config.tensor_parallel
    compiled = compiled_layers(config, source.shape, source.dtype)
    if config.exact and not compiled:
        wrong = "the same bits at any number of ranks are what the compiled layers give, and torch runs these"
        raise CapabilityError(f"exact=True with tensor_parallel={count}", wrong, "leave out exact, or use bfloat16")
    if is_gguf(source.folder):
        wrong = "a GGUF file's weights are in blocks, which are not cut at ranks"
        raise CapabilityError(f"tensor_parallel={count} with {source.name}", wrong, "use the original checkpoint")
    shape = source.shape if part.layers is None else source.shape.part(*part.layers, part.ends)
    if not part.ends:
        shape = replace(shape, vocab_size=count)  # of which nobody has a use
    return Share(shape, rank, count, by_outputs(config.exact, source.quant))


def load_share(config: LLMConfig, source: Source, ranks: Ranks, part: TargetPart) -> Decoder:
    """A rank's share of a part of the target; errors as of `load_model`."""
    return load_model(
        source.folder,
        attention=make_attention(config, source.dtype, config.exact),
        dtype=source.quant or source.dtype,
        device=config.device,
        exact=config.exact,
        native=compiled_layers(config, source.shape, source.dtype),
        stretch=source.shape.stretch,
        ranks=ranks,
        layers=part.layers,
        ends=part.ends,
    )


def stage_devices(config: LLMConfig) -> list[str]:
    """The devices of the target's stages on this host. The last one is this process's; a target that is not split over
    processes here has that one alone.
    """
    split = None if config.pipeline is None else parse_split(config.pipeline)
    if split is None or config.cluster is not None:
        return [config.device]
    return share_devices(config.device, split.stages, torch.cuda.device_count())


def draft_device(config: LLMConfig, place: Place) -> str:
    """The device of a drafter in a process of its own: the one that is named, or the next one behind the stages'."""
    devices = len(stage_devices(config)) + 1
    return place.device or share_devices(config.device, devices, torch.cuda.device_count())[-1]


def own_layers(config: LLMConfig, shape: DecoderConfig) -> tuple[int, int] | None:
    """The layers that stay in this process where others have the rest; None: all.

    Raises:
        ConfigError: more stages than layers, or a cut of another number of layers.
    """
    if config.pipeline is None:
        return None
    chosen = parse_round(config.round)
    assert isinstance(chosen, PipelineConfig), "the configuration makes it one"
    start, stop = chosen.bounds(shape.num_layers)[-2:]
    return start, stop


def check_shared(config: LLMConfig, other: LLMConfig) -> None:
    """Refuse to run one configuration on the target that was loaded for another.

    Raises:
        ConfigError: they differ in an option on which the target depends.
    """
    for name in TARGET_OPTIONS:
        mine, theirs = getattr(config, name), getattr(other, name)
        if mine != theirs:
            raise ConfigError(
                f"LLM(..., share=...) with {name}={mine!r}",
                f"the shared target was loaded with {theirs!r}",
                "give the same, or leave share out",
            )


@dataclass(frozen=True, slots=True)
class Source:
    """A checkpoint whose configuration was read, and nothing else."""

    name: str
    folder: Path
    shape: DecoderConfig
    dtype: torch.dtype  # of the activations
    quant: Quant | None  # how the weights are stored

    def tokenizer(self, texts: bool = True) -> Any:
        """Its tokenizer, or without ``texts`` what knows ids and pieces (``get_vocab``) alone; None: it has none.

        Raises:
            ConfigError: it cannot be read.
        """
        load = load_tokenizer if texts else load_vocabulary
        return load(self.folder) if self.tokenizer_files() else None

    def tokenizer_files(self) -> list[Path]:
        """Those that are there; a GGUF file is its own."""
        if is_gguf(self.folder):
            return [self.folder]
        files = [self.folder / n for n in ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")]
        return [file for file in files if is_file(file)]


def open_source(config: LLMConfig, name: str, dtype: str) -> Source:
    """A checkpoint's configuration; ``dtype`` as of `LLMConfig`.

    Raises:
        ConfigError: it is none that can be used.
    """
    revision = config.revision if name == config.model else None
    spec = parse_model(name)
    folder = resolve_folder(spec.name, revision=revision, offline=config.offline)
    if is_file(folder / CONFIG_FILE):
        raise ConfigError(
            f"model {name!r}",
            "it is a set that was trained for a model, not a model",
            "give it as an application, or to drafter='streams:...'",
        )
    shape = replace(read_config(folder), stretch=spec.stretch)
    kind, quant = parse_dtype(dtype, shape)
    return Source(spec.label, folder, shape, kind, quant)


def _load(
    config: LLMConfig, source: Source, exact: bool, layers: tuple[int, int] | None = None, texts: bool = True
) -> LoadedModel:
    folder, kind = source.folder, source.dtype
    compiled = compiled_layers(config, source.shape, kind)
    attention = make_attention(config, kind, exact)
    # Before the weights: what is wrong with it is said at once.
    tokenizer = source.tokenizer(texts)
    if source.shape.tracks > 1:
        own: dict[str, Any] = {"dtype": source.quant or kind, "device": stage_devices(config)[-1], "native": compiled}
        tracks = load_tracks(folder, attention=attention, **own)
        return LoadedModel(source.name, tracks, tokenizer, folder, source.shape.num_layers)
    decoder = load_model(
        folder,
        attention=attention,
        dtype=source.quant or kind,
        device=stage_devices(config)[-1],
        exact=exact,
        native=compiled,
        stretch=source.shape.stretch,
        layers=layers,
    )
    return LoadedModel(source.name, decoder, tokenizer, folder, source.shape.num_layers)


def load_track(config: LLMConfig, source: Source, ranks: Ranks) -> Tracks:
    """The track of one of several processes; errors as of `load_model`."""
    kind = source.dtype
    how: dict[str, Any] = {"dtype": source.quant or kind, "native": compiled_layers(config, source.shape, kind)}
    return load_tracks(source.folder, attention=make_attention(config, kind, False), ranks=ranks, **how)


def make_attention(config: LLMConfig, dtype: torch.dtype, exact: bool) -> AttentionBackend:
    """The attention of layers that torch runs.

    Raises:
        CapabilityError: one that is not exact, where that is asked for.
    """
    backend = config.attention
    if backend == "auto":
        backend = "reference" if dtype == torch.float64 else "sdpa"
    if exact and backend == "reference" and dtype != torch.float64:
        raise CapabilityError(
            "exact=True with attention='reference'",
            "the dense reference does not keep a row's order of summation",
            "use attention='sdpa'",
        )
    return make_backend(backend, dtype, exact=exact)


def compiled_layers(config: LLMConfig, shape: DecoderConfig, dtype: torch.dtype) -> bool:
    """Whether the compiled layers run this model."""
    asked_for_torch = config.kernels == "torch" or config.attention != "auto"
    if config.kernels == "native" and config.attention != "auto":
        raise ConfigError(
            f"kernels='native' with attention={config.attention!r}",
            "the compiled layers have an attention of their own",
            "leave attention out, or use kernels='torch'",
        )
    if asked_for_torch:
        return False
    why = unsupported(shape, dtype, parse_device(config.device))
    if why and config.kernels == "native":
        raise CapabilityError("kernels='native'", why, "use kernels='auto' or 'torch'")
    return why is None


def kv_layout(config: LLMConfig, shape: DecoderConfig, dtype: torch.dtype) -> tuple[tuple[int, int, int], torch.dtype]:
    """Layers, K/V heads and width of a row of the target's K/V, and what its numbers are.

    Raises:
        CapabilityError: K/V in int8 under layers that torch runs.
    """
    compiled = compiled_layers(config, shape, dtype)
    kept = cache_shape(shape, compiled)
    if config.kv_cache_dtype == "auto":
        return kept, dtype
    if not compiled:
        wrong = "torch's layers read keys and values as the activations are"
        raise CapabilityError(
            "kv_cache_dtype='int8'", wrong, "leave it out, or use the compiled layers (kernels='native')"
        )
    return packed_shape(kept), torch.int8


# Starts the process of a configuration's drafter: given the tokens of the target's K/V pool, the drafted nodes of a
# sequence that its sessions have room for, and where it runs.
ServeApart = Callable[[LLMConfig, int, int, Place], GoingSessions]

# Starts the processes of a target's stages, and gives the line over them, for the pipeline round.
StartStages = Callable[[LLMConfig, Split, LoadedModel, KVPool], StageLine]


def build_engine(
    config: LLMConfig,
    target: LoadedModel,
    serve: ServeApart | None = None,
    start: StartStages | None = None,
    tracks: StartTracks | None = None,
) -> Engine:
    """Drafter, pool, budget, round and engine over a loaded target.

    Args:
        serve: starts a drafter's own process, where the round asks for one.
        start: starts the stages' processes, where the target is split.
        tracks: starts those of a draft's tracks, where each has one.

    Raises:
        ConfigError: a part that is not available, or parts that do not fit together.
    """
    decoder = target.decoder
    folders = locate(config.applications or {}, config.offline)
    applications = load_applications(folders, decoder, target.name, target.folder)
    streams = max([0, *(a.streams.config.gamma for a in applications.values() if a.streams is not None)])  # of a row
    drafter = build_drafter(config, target, streams, tracks)
    if decoder.ranks is not None:
        _check_beside_ranks(config.tensor_parallel, drafter, applications)
    if drafter is not None and drafter.spec.scratch and config.kv_cache_dtype != "auto":
        wrong = "it reads the target's keys and values, and turns some, as the activations are"
        asked = f"kv_cache_dtype={config.kv_cache_dtype!r} with drafter {drafter.spec.name!r}"
        raise CapabilityError(asked, wrong, "leave it out, or use another drafter")
    max_model_len = _max_model_len(config, decoder.config)
    same = {name: getattr(config, name) for name in ("max_sequences", "max_batch_rows", "max_waiting")}
    scheduler = SchedulerConfig(**same, max_prompt_rows=parse_prompt_rows(config.max_prompt_rows))
    rows = streams, config.max_batch_rows, config.max_sequences
    pool = make_pool(config, target, max_model_len, 0 if drafter is None else drafter.spec.scratch_slots(*rows))
    round_config = parse_round(config.round)
    apart = round_config is not None and round_config.place is not None
    if drafter is not None and config.pipeline is not None:
        round_of(config.round, drafter.spec)  # before it misses the layers that are elsewhere
    if drafter is not None and not apart:
        info = decoder.info(target.name, target.tokenizer)
        drafter.bind(info, config.max_sequences, pool.num_tokens, decoder.device)
    budget = make_budget(config, drafter, target)
    starts = None if serve is None else partial(serve, config, pool.num_tokens)
    find, trained = partial(resolve_folder, offline=config.offline), partial(zoo.weights, model=config.model)
    origin = Origin(target.name, target.folder, find, trained)
    parts: dict[str, Any] = {"target": decoder, "pool": pool, "drafter": drafter, "verifier": config.verifier}
    parts |= {"origin": origin, "serve": starts}
    if config.pipeline is not None and start is not None:
        parts["start"] = partial(start, config, parse_split(config.pipeline), target, pool)
    round_ = make_round(config.round, **parts)
    shape = decoder.config
    limits = EngineLimits(vocab_size=shape.vocab_size, max_model_len=max_model_len, eos_ids=shape.eos_ids)
    grammars = Grammars(target.tokenizer, shape.vocab_size, shape.eos_ids)
    return Engine(round_, pool, limits, scheduler, budget, texts_of(target.tokenizer), applications, grammars)


def _check_beside_ranks(count: int, drafter: Drafter | None, applications: Mapping[str, Application]) -> None:
    """Refuse what reads weights of the target, or does to streams what takes all of its heads.

    Raises:
        CapabilityError: such a drafter or application.
    """
    for name, own in applications.items():
        if own.streams is not None and own.streams.config.value_rotation is not None:
            wrong = "its streams rotate values, which ranks do not"
            raise CapabilityError(f"tensor_parallel={count} with application {name!r}", wrong, "leave one of them out")
    if drafter is None:
        return
    spec, streams, wrong = drafter.spec, drafter.spec.streams, ""
    if spec.taps or spec.scratch:
        wrong = "it reads the target's states or weights, of which each rank has a part"
    elif streams is not None and (streams.attention_limit is not None or streams.rotates):
        wrong = "its streams see few keys, or rotate values, by what all heads say, and each rank has some"
    if wrong:
        remedy = "use draft_model, ngram, suffix or streams"
        raise CapabilityError(f"tensor_parallel={count} with drafter {spec.name!r}", wrong, remedy)


def _load_drafts(
    config: LLMConfig,
    texts: bool,
    auto: torch.dtype,
    start: StartTracks | None,
    name: str,
    dtype: str,
    processes: int = 1,
) -> LoadedModel:
    """A model that a drafter runs, loaded as the target was; ``auto``: what dtype "auto" means.

    Args:
        processes: that share it; ``start`` starts all but this one.

    Raises:
        ConfigError: it cannot be loaded, or has another number of tracks.
        CapabilityError: tracks in processes for a drafter on a GPU, or where nobody starts them.
    """
    wanted = str(auto).removeprefix("torch.") if dtype == "auto" else dtype
    source = open_source(config, name, wanted)
    if processes == 1:
        return _load(config, source, exact=False, texts=texts)
    asked = f"drafter='draft_model:{name}' with processes={processes}"
    if source.shape.tracks != processes:
        wrong = f"its tracks are {source.shape.tracks}" if source.shape.tracks > 1 else "it is no draft of tracks"
        raise ConfigError(asked, wrong, "give as many processes as tracks, or leave processes out")
    if start is None or parse_device(config.device).type != "cpu":
        wrong = "processes share a draft's tracks on CPUs, beside an engine"
        raise CapabilityError(asked, wrong, "leave processes out")
    tokenizer, ranks = source.tokenizer(texts), start(config, source)
    decoder = load_track(config, source, ranks)
    assert ranks.line is not None, "rank 0 has the line to the others"
    ranks.line.start()
    return LoadedModel(source.name, decoder, tokenizer, source.folder, source.shape.num_layers)


def drafter_of(config: LLMConfig) -> DrafterConfig | None:
    """The drafter that the configuration names, with the zoo's weights for the target where it means those.

    Raises:
        ConfigError: the zoo has none.
    """
    chosen = registry.parse(config.drafter)
    if chosen is None:
        return None
    return chosen.with_weights(partial(_of_the_zoo, config.model), bool(config.applications))


def _of_the_zoo(model: str, kind: str) -> str:
    found = zoo.weights(kind, model)
    if found is None:
        trained = [entry.read_by for entry in zoo.trained_for(model) if entry.read_by in registry.names()]
        fits = ", ".join([*dict.fromkeys(trained), *registry.without_weights()])
        wrong = "it names no weights, and the zoo has none of it for this model"
        remedy = f"name them, as {kind}:FOLDER, or use a drafter that fits this model as it is: {fits}"
        raise ConfigError(f"drafter={kind!r} for {model}", wrong, remedy)
    return found


def build_drafter(
    config: LLMConfig, target: LoadedModel, streams: int, tracks: StartTracks | None = None
) -> Drafter | None:
    """The drafter that the configuration names; None: it names none.

    Args:
        streams: most streams that a row of the applications beside it carries.
        tracks: starts the processes of a draft's tracks.
    """
    chosen = drafter_of(config)
    if chosen is None:
        return None
    source = target.name, target.folder, target.decoder.dtype
    return registry.build(chosen, drafter_context(config, *source, streams, tracks=tracks))


def drafter_context(
    config: LLMConfig,
    name: str,
    folder: Path,
    dtype: torch.dtype,
    streams: int = 0,
    texts: bool = True,
    tracks: StartTracks | None = None,
) -> DrafterContext:
    """What a drafter may use while it is built, for a target of this name, folder and dtype.

    Args:
        streams: most streams that a row of the applications beside it carries.
        texts: whether texts are read and written here; else of tokenizers their vocabulary is enough.
        tracks: starts the processes of a draft's tracks.
    """
    return DrafterContext(
        load_model=partial(_load_drafts, config, texts, dtype, tracks),
        dtype=dtype,
        device=parse_device(stage_devices(config)[-1]),
        find=partial(resolve_folder, offline=config.offline),
        target=name,
        target_folder=folder,
        streams=streams,
    )


def make_budget(config: LLMConfig, drafter: Drafter | None, target: LoadedModel) -> DraftBudget:
    """The draft budget: what was asked for, or chosen by the engine."""
    if drafter is None:
        return FixedBudget(size=0, why="no drafter was named")
    chosen = parse_budget(config.budget)
    if chosen != AUTO:
        return chosen
    round_ = parse_round(config.round)
    if round_ is not None and not round_.weighs:
        if config.budget is not None:
            raise CapabilityError(
                f"budget={config.budget!r} with round={config.round!r}",
                "the automatic budget adds the times of draft and target, which this round lets run at once",
                "give a number of nodes or a table, or leave budget out",
            )
        return FixedBudget(size=drafter.spec.window)
    if drafter.spec.default_budget == 0:
        return FixedBudget(size=0, why=f"drafter {drafter.spec.name!r} drafts nothing by default")
    return _auto_budget(config, drafter, target)


def _auto_budget(config: LLMConfig, drafter: Drafter, target: LoadedModel) -> AutoBudget:
    """Costs of a machine that is named; else from the model's calibration, where there is one; else estimated now."""
    decoder = target.decoder
    if config.costs != AUTO_COSTS:
        return AutoBudget.of(drafter.spec, _predicted(config.costs, target))
    found, where = calibration.find(target.folder, fingerprint(config, decoder))
    if found is not None:
        table, drafts = found.table, found.drafts
    else:
        table, drafts = calibration.quick_estimate(decoder, config.max_sequences, why=where), {}
    return AutoBudget.of(drafter.spec, table, drafts.get(_draft_name(config)))


def _predicted(machine: str, target: LoadedModel) -> CostTable:
    """The planner's costs of this target on a machine that has a name."""
    decoder = target.decoder
    sizes, named = shape_of(decoder.config), machines.machine(machine)
    network = ServedModel(shape=sizes, weight_bytes=decoder.weight_bytes, kv_bytes=decoder.dtype.itemsize)
    points = cost_points(lambda *size: pass_seconds(network, named, *size), network.shape.max_position)
    return CostTable(**points, source=f"predicted by the planner for {machine}")


def fingerprint(config: LLMConfig, decoder: Decoder) -> Fingerprint:
    """Under which conditions this target's speed was, or would be, measured."""
    kernels = "native" if compiled_layers(config, decoder.config, decoder.dtype) else "torch"
    kernels += f" in {config.tensor_parallel} ranks" if config.tensor_parallel > 1 else ""
    return calibration.fingerprint(decoder, kernels)


def _draft_name(config: LLMConfig) -> str:
    """The calibration's name for the draft model that the drafter runs; empty where it runs none."""
    chosen = drafter_of(config)
    name = getattr(chosen, "model", None)
    return draft_key(str(name), str(getattr(chosen, "dtype", "auto"))) if name else ""


def draft_key(name: str, dtype: str) -> str:
    """What a calibration calls the passes of a draft model."""
    return f"{name},dtype={dtype}"


def _max_model_len(config: LLMConfig, shape: DecoderConfig) -> int:
    context = shape.max_position
    wanted = config.max_model_len or context
    if wanted > context:
        note = f" ({shape.max_position_note})" if shape.max_position_note else ""
        raise ConfigError(
            f"max_model_len={wanted}", f"{config.model} has {context} positions{note}", f"give {context} or less"
        )
    return wanted


def _pool_tokens(
    config: LLMConfig, kept: tuple[int, int, int], dtype: torch.dtype, max_model_len: int, scratch: int = 0
) -> int:
    """Tokens that a K/V pool of this shape will hold; checks that there is memory for them."""
    per_token = KVPool.bytes_per_token(*kept, dtype)
    # One sequence alone must always fit, with its last token's row.
    least = max_model_len + 1
    if config.kv_memory is None:
        most = (max_model_len + 1) * config.max_sequences
        tokens = max(least, min(most, DEFAULT_KV_BYTES // per_token))
    else:
        tokens = parse_bytes(config.kv_memory) // per_token
        if tokens < least:
            raise ConfigError(
                f"kv_memory={config.kv_memory}",
                f"it holds {tokens} tokens of {per_token} bytes, and one request may have {max_model_len}",
                f"give {least * per_token} bytes or more, or a smaller max_model_len",
            )
    wanted, free = (tokens + scratch) * per_token, free_bytes(parse_device(stage_devices(config)[-1]))
    if free is not None and wanted > free:
        raise _too_little_memory(config, max_model_len, per_token, wanted, f"{free / 2**30:.1f} GiB are free")
    return tokens


def make_pool(config: LLMConfig, target: LoadedModel, max_model_len: int, scratch: int) -> KVPool:
    """The target's K/V pool, with ``scratch`` slots for streams. Its tokens are as many as memory for all layers holds,
    wherever these are.

    Raises:
        ConfigError: too little memory.
    """
    decoder = target.decoder
    kept, kind = kv_layout(config, decoder.own, decoder.dtype)
    whole, _ = kv_layout(config, decoder.config, decoder.dtype)
    all_layers = target.layers * decoder.config.stretch, *whole[1:]
    tokens = _pool_tokens(config, all_layers, kind, max_model_len, scratch)
    try:
        pool = KVPool(*kept, tokens, kind, decoder.device, scratch_slots=scratch)
        if decoder.ranks is not None and decoder.ranks.line is not None:
            decoder.ranks.line.follow(pool)
        return pool
    except (MemoryError, RuntimeError) as error:  # torch's allocators raise RuntimeError, or its OutOfMemoryError
        per_token = KVPool.bytes_per_token(*kept, kind)
        wanted = (tokens + scratch) * per_token
        raise _too_little_memory(config, max_model_len, per_token, wanted, "there is not so much to give") from error


def _too_little_memory(config: LLMConfig, max_model_len: int, per_token: int, wanted: int, why: str) -> ConfigError:
    asked = f"kv_memory={config.kv_memory}" if config.kv_memory is not None else "the default kv_memory"
    return ConfigError(
        f"{asked} on {config.device}",
        f"K/V of {wanted // per_token:,} tokens takes {wanted / 2**30:.1f} GiB, and {why}",
        f"give max_model_len (now {max_model_len:,}; one request of 4,096 tokens takes "
        f"{4096 * per_token / 2**30:.2f} GiB) or a smaller kv_memory",
    )
