"""Applications: trained sets that requests name, over one base model.

An application is a set of adapters, with or without streams, that was trained in shared mode for one target
(Speculative Streaming, section 2.4: one base model, an adapter an application). The rows of a request that
names it go through the base's linear layers plus the application's adapters; rows of other requests in the same pass
are not affected.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..core.errors import CapabilityError, ConfigError
from ..core.options import shown
from ..papers.streaming.model import CONFIG_FILE, WEIGHTS_FILE, StreamSet, read_config
from ..weights.files import check_target, fingerprint
from ..weights.loader import resolve_folder
from .adapters import AdapterRange, LowRank, joined, linear_shapes
from .decoder import Decoder
from .families import DecoderConfig

BASE = "base"  # what the base model is called where a word is needed, so no application may be


@dataclass(frozen=True, kw_only=True, eq=False)
class Application:
    """One trained set in shared mode, ready to run."""

    name: str  # the name that requests use
    identity: str  # sha256 of the set's files: K/V is shared among requests with the same one
    adapter: LowRank | None  # of main and stream rows; None: the set has streams alone
    streams: StreamSet | None = None  # main rows attend to them; None: the set has adapters alone


def locate(named: Mapping[str, str], offline: bool = False) -> dict[str, Path]:
    """The folder of every application's trained set.

    Raises:
        ConfigError: no such folder, or an invalid name; names the application.
    """
    folders = {}
    for name, where in named.items():
        _check_name(f"application {shown(name)} ({shown(str(where))})", name)
        try:
            folders[name] = resolve_folder(where, offline=offline)
        except ConfigError as error:
            asked = f"application {shown(name)}: {str(where)[:300]}"
            raise ConfigError(asked, "no such trained set", f"check the folder ({error})") from error
    return folders


def load_applications(
    folders: Mapping[str, Path], decoder: Decoder, target: str, target_folder: Path
) -> dict[str, Application]:
    """Trained sets by the names that requests use, for the target whose checkpoint lies in a folder.

    Raises:
        ConfigError: an invalid name, files that are missing or broken, a set in lossless mode, or one that was trained
            for another target.
    """
    if not folders:
        return {}
    known = fingerprint(target_folder)
    return {name: _load(name, folder, decoder, target, known) for name, folder in folders.items()}


def _load(name: str, folder: Path, decoder: Decoder, target: str, known: str) -> Application:
    asked = f"application {name!r} ({folder})"
    _check_name(asked, name)
    config = read_config(folder)
    if config.mode != "shared":
        raise ConfigError(
            asked,
            "the set was trained in lossless mode: it drafts for the base model and does not change its answers",
            f"draft with it: drafter='streams:{folder}', or train it with mode='shared'",
        )
    check_target(asked, config, target, decoder.config, known)
    made = StreamSet.load(folder, dtype=decoder.dtype, device=decoder.device)
    return make_application(name, made, decoder, identity(folder))


def _check_name(asked: str, name: str) -> None:
    if not name or name == BASE or name != name.strip():
        raise ConfigError(
            asked, f"{shown(name)} cannot name an application", f"choose another; {BASE!r} is the base model"
        )


def make_application(name: str, trained: StreamSet, decoder: Decoder, identity: str) -> Application:
    """An application of a set in memory, whose parameters have the decoder's dtype and device.

    Raises:
        ConfigError: adapters of other widths than the target's linear layers.
    """
    adapter = trained.adapters
    if adapter is not None:
        _check_shapes(f"application {name!r}", adapter, decoder.config)
        if decoder.stack is None:
            adapter.prepare(exact=decoder.exact)
    return Application(name=name, identity=identity, adapter=adapter, streams=trained if trained.config.gamma else None)


def identity(folder: Path) -> str:
    """sha256 of a set's configuration and weights."""
    digest = hashlib.sha256()
    for file in (CONFIG_FILE, WEIGHTS_FILE):
        content = (folder / file).read_bytes()
        digest.update(len(content).to_bytes(8, "little") + content)
    return digest.hexdigest()


def _check_shapes(asked: str, adapter: LowRank, shape: DecoderConfig) -> None:
    shapes = linear_shapes(shape)
    for layer, linear, down, up in adapter.pairs():
        found = (down.shape[1], up.shape[0])
        if found != shapes[linear]:
            raise CapabilityError(
                asked,
                f"the adapter of layer {layer}, {linear} is for {found[0]} inputs and {found[1]} outputs, "
                f"the target has {shapes[linear][0]} and {shapes[linear][1]}",
                "use a set that was trained for this target",
            )


def adapter_ranges(
    applications: Sequence[Application | None], rows: Sequence[tuple[int, int]]
) -> tuple[AdapterRange, ...]:
    """Which rows of a pass have which adapters: disjoint ranges in ascending order; neighbours with the same adapters
    are one.

    Args:
        applications: [B] of each sequence.
        rows: [B] (first, one past the last) packed row of each sequence, ascending.
    """
    adapters = [None if application is None else application.adapter for application in applications]
    return joined((start, stop, adapter) for adapter, (start, stop) in zip(adapters, rows, strict=True))
