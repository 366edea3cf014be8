"""Stages of a target in processes of their own: from the options of an `LLM` to workers and the stage_line over them.

Each process loads its layers and nothing else: embedding, final norm and head are the coordinator's, with the last
layers.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast
from weakref import finalize

import torch

from .. import kernels
from ..api.assembly.memory import kv_layout
from ..api.assembly.models import LoadedModel, exact_layers, load_decoder
from ..api.config import LLMConfig
from ..api.split import Split, parse_split
from ..core.errors import ConfigError
from ..core.options import written
from ..engine.rounds import parse_round
from ..kv.pool import KVPool
from ..kv.store import KVStore
from ..model.devices import ALL_GPUS, share_devices
from ..model.stages import Stage
from ..weights.source import Source, parse_device
from .handshake import Facts
from .placement import Placement, cores, pin
from .rank_worker import facts_of, options_of
from .remote import LocalHandle, Remote, WorkerSpec
from .stage_service import StageService
from .stage_workers import StageWorkers
from .workers import TIMEOUTS, end_all

if TYPE_CHECKING:
    from .ray_cluster import ClusterHosts

log = logging.getLogger(__name__)


def start_stages(hosts: ClusterHosts | None, config: LLMConfig, target: LoadedModel, pool: KVPool) -> StageWorkers:
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
    last = Stage(target.decoder, 0, target.decoder.num_layers, pool.tensors, bounds[-2])
    stage_line = StageWorkers(workers, last, source.shape.num_layers, "" if hosts is None else hosts.address)
    finalize(stage_line, end_all, workers)
    stage_line.start()
    if placements[-1].cores:
        pin(placements[-1].cores)
    if config.threads is None and placements[-1].num_threads:
        torch.set_num_threads(placements[-1].num_threads)
    return stage_line


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
    return WorkerSpec(
        name=f"stage {index}",
        service=f"{__name__}:service",
        options={"options": options_of(config, source), **part},
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
    decoder = load_decoder(config, source, exact_layers(config, source), (start, stop))
    shape, kind = kv_layout(config, decoder.local, source.dtype)
    store = KVStore(*shape, slots, kind, where)
    return StageService(Stage(decoder, 0, stop - start, store, start), _facts(source, bool(config.exact)))


def _facts(source: Source, exact: bool) -> Facts:
    in_use = f"{kernels.describe()}, {torch.backends.cpu.get_cpu_capability()}"
    return replace(facts_of(source), torch=torch.__version__, instructions=in_use if exact else "")
