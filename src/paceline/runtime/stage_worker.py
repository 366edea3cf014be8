"""Stages of a target in processes of their own: from the options of an `LLM` to workers and the stage_line over them.

Each process loads its layers and nothing else: embedding, final norm and head are the coordinator's, with the last
layers.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from hashlib import sha256
from statistics import median
from typing import TYPE_CHECKING, Any, cast
from weakref import finalize

import torch

from .. import kernels
from ..api.assembly.memory import kv_layout
from ..api.assembly.models import LoadedModel, TargetPart, load_part, load_ranks
from ..api.config import LLMConfig
from ..api.split import Split, parse_split
from ..core.errors import ConfigError
from ..core.inference import inference
from ..core.options import shown, written
from ..engine.rounds import parse_round
from ..kv.pool import KVPool
from ..kv.store import KVStore
from ..model.devices import ALL_GPUS, share_devices
from ..model.stages import TEXT, Frame, Stage, StageRows, cut_by_rows, even_cuts
from ..weights.source import Source, parse_device
from .handshake import Facts
from .messages import KINDS
from .placement import Placement, cores, pin
from .rank_worker import facts_of, options_of, start_ranks
from .remote import LocalHandle, Remote, WorkerSpec
from .stage_service import StageService
from .stage_workers import StageWorkers
from .workers import TIMEOUTS, end_all

if TYPE_CHECKING:
    from .cluster import ClusterHosts

_MEASURED = "layers=auto"  # of the round, in place of a cut
TIMED_KEYS, TIMES = 256, 9  # of a cut's measurement: tokens in front, passes of which the median counts

log = logging.getLogger(__name__)


def start_stages(config: LLMConfig, target: LoadedModel, pool: KVPool, hosts: ClusterHosts | None) -> StageWorkers:
    """Start the stages of a target but the last one, which is the coordinator's, and wait until they are ready.

    They end with what is returned. Where stages have cores, this process keeps to its own from then on.

    Raises:
        ConfigError: cores that are not there, or a host that differs in weights, vocabulary, dtype or version.
        WorkerFailed: a stage does not start.
    """
    source, chosen = target.source, cast("Any", parse_round(config.round))
    assert config.pipeline is not None, "the configuration names stages"
    bounds = chosen.bounds(source.shape.num_layers)
    slots = pool.tensors.all_k.shape[2]
    placements = place(parse_split(config.pipeline), config.device, hosts)
    workers = []
    for index, (start, stop) in enumerate(zip(bounds[:-2], bounds[1:-1], strict=True)):
        part = {"start": start, "stop": stop, "slots": slots}
        spec = stage_spec(config, index, part, placements[index], source)
        workers.append(Remote(spec, TIMEOUTS, LocalHandle if hosts is None else hosts.launch(index)))
    last = Stage(target.decoder, 0, target.decoder.num_layers, pool.tensors)
    stage_line = StageWorkers(workers, last, source.shape.num_layers, "" if hosts is None else hosts.address)
    finalize(stage_line, end_all, workers)
    stage_line.start()
    if placements[-1].cores:
        pin(placements[-1].cores)
    if config.threads is None and placements[-1].num_threads:
        torch.set_num_threads(max(1, placements[-1].num_threads // config.tensor_parallel))
    return stage_line


def with_cut(config: LLMConfig, source: Source) -> LLMConfig:
    """Return the options with ``layers=auto`` replaced by a cut from what a layer and the head take here.

    A layer is timed with one row and with w rows. Rows fall along a pipeline, since its trees are pruned on their way:
    taken are w of them in the first stage, one in the last, and even factors between.

    Raises:
        ConfigError: stages on other hosts, more stages than layers, a checkpoint that cannot be used.
    """
    if config.pipeline is None or _MEASURED not in config.round.split(","):
        return config
    split, chosen = parse_split(config.pipeline), cast("Any", parse_round(config.round))
    if config.cluster is not None:
        wrong = "what other hosts take is not measured"
        raise ConfigError(f"cluster={shown(config.cluster)} with layers=auto", wrong, "name the layers of each stage")
    count, width = source.shape.num_layers, chosen.width
    even_cuts(count, split.stages)  # raises now if their number is wrong
    layer, head = _timed(config, source, place(split, config.device)[-1].num_threads, (1, width))
    rows = [width ** (1 - stage / max(1, split.stages - 1)) for stage in range(split.stages)]
    slope = (layer[width] - layer[1]) / max(1, width - 1)
    bounds = cut_by_rows(count, rows, lambda n: layer[1] + max(0.0, slope) * (n - 1), head)
    layers = "x".join(str(b - a) for a, b in zip(bounds, bounds[1:], strict=False))
    log.info("stages of %s layers: one takes %.2f ms, the head %.2f ms", layers, 1e3 * layer[1], 1e3 * head)
    text = ",".join(f"layers={layers}" if part == _MEASURED else part for part in config.round.split(","))
    return replace(config, round=text)


@inference
def _timed(
    config: LLMConfig, source: Source, threads: int | None, rows: Sequence[int]
) -> tuple[dict[int, float], float]:
    """Return the median seconds of the last layer by rows, and of the head with one row, with so many threads."""
    before = torch.get_num_threads()
    decoder = load_part(config, source, TargetPart((source.shape.num_layers - 1, source.shape.num_layers), ends=True))
    pool = KVPool(*decoder.cache_shape, TIMED_KEYS + max(rows), decoder.dtype, decoder.device)
    stage = Stage(decoder, 0, 1, pool.tensors)
    hidden = torch.zeros(max(rows), decoder.config.d_model, dtype=decoder.dtype, device=decoder.device)
    times = {}
    torch.set_num_threads(threads or before)
    try:
        for count in rows:
            keys, places = TIMED_KEYS + count, range(TIMED_KEYS, TIMED_KEYS + count)
            text = StageRows(0, 0, [0] * count, [TEXT] * count, places, slice(0, keys), keys, TIMED_KEYS)
            times[count] = _median_s(partial(stage.run, Frame(0, [text], hidden[:count])))
        return times, _median_s(lambda: decoder.read(hidden[:1]))
    finally:
        torch.set_num_threads(before)


def _median_s(call: Callable[[], Any]) -> float:
    times = []
    for _ in range(TIMES + 2):
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return median(times[2:])


def place(split: Split, device: str, hosts: ClusterHosts | None = None) -> list[Placement]:
    """Return where each stage runs, the coordinator's last.

    It has cores of its own, where cores are named, and with ``cuda`` a GPU of its own, where there are as many; on a
    cluster it runs in its bundle.

    Raises:
        ConfigError: fewer cores than stages, cores that do not go evenly into them or are not there.
    """
    count = split.stages
    if hosts is not None:
        return [hosts.placement(device, split.threads)] * count
    devices = share_devices(device, count, torch.cuda.device_count())
    if device == ALL_GPUS and len(set(devices)) < count:
        log.warning("%d stages share %d GPUs: those on the same one wait for each other", count, len(set(devices)))
    if not split.cores:
        threads = split.threads or max(1, len(cores()) // count)
        return [Placement(threads=threads, device=part) for part in devices]
    each, remainder = divmod(len(split.cores), count)
    if remainder or not each:
        wrong = f"{len(split.cores)} cores cannot be shared evenly by {count} stages"
        raise ConfigError(f"pipeline cores={written(split.cores)}", wrong, "name as many for every stage, in order")
    shares = [split.cores[i * each : (i + 1) * each] for i in range(count)]
    return [Placement(cores=part, threads=split.threads, device=at) for part, at in zip(shares, devices, strict=True)]


def stage_spec(config: LLMConfig, index: int, part: Mapping[str, int], where: Placement, source: Source) -> WorkerSpec:
    """Describe a worker with a stage.

    Args:
        config: the options of the coordinator.
        index: which stage.
        part: its layers and slots, as of `service`.
        where: it runs.
        source: the target.
    """
    options = options_of(config, source) | {"tensor_parallel": config.tensor_parallel}
    return WorkerSpec(
        name=f"stage {index}",
        service=f"{__name__}:service",
        options={"options": options, **part},
        kinds=KINDS,
        expected=_facts(source, bool(config.exact)),
        placement=where,
    )


def service(device: str, options: Mapping[str, Any], start: int, stop: int, slots: int) -> StageService:
    """Make the service of a stage, in its own process.

    Args:
        device: where it computes.
        options: those of `LLMConfig` that it must know.
        start, stop: its layers.
        slots: of K/V.

    Raises:
        ConfigError: a checkpoint that cannot be used, layers that it does not have, too little memory.
    """
    config = LLMConfig(**{**options, "device": device})
    source = config.resolve()
    layers, where = source.shape.num_layers, parse_device(device)
    if not 0 <= start < stop <= layers:
        subject = f"a stage of layers {start} to {stop - 1} of {config.model}"
        raise ConfigError(subject, f"it has layers 0 to {layers - 1}", "give both sides the same checkpoint")
    part = TargetPart((start, stop), ends=False)
    if config.tensor_parallel > 1:  # they share the threads that this process was given
        stage_config = replace(config, threads=max(1, torch.get_num_threads() // config.tensor_parallel))
        decoder = load_ranks(stage_config, source, part, start_ranks(stage_config, source, part))
    else:
        decoder = load_part(config, source, part)
    shape, kind = kv_layout(config, decoder.local, source.dtype)
    store = KVStore(*shape, slots, kind, where)
    return StageService(Stage(decoder, 0, stop - start, store), _facts(source, bool(config.exact)))


def _facts(source: Source, exact: bool) -> Facts:
    in_use = f"{kernels.describe()}, {torch.backends.cpu.get_cpu_capability()}"
    vocabulary = sha256()  # of the tokenizer's files: a stage has no tokenizer, and reading one takes long
    for file in source.tokenizer_files():
        vocabulary.update(file.name.encode() + sha256(file.read_bytes()).digest())
    more = {"torch": torch.__version__, "instructions": in_use if exact else ""}
    return replace(facts_of(source), vocabulary=vocabulary.hexdigest(), **more)
