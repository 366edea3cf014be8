"""Load sets that were trained in shared mode: one base model, an adapter an application.

Source: Speculative Streaming, section 2.4.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from ...core.errors import CapabilityError, ConfigError
from ...model.adapters import linear_shapes
from ...model.applications import Application
from ...model.decoder import Decoder
from ...weights.files import check_target
from .model import CONFIG_FILE, WEIGHTS_FILE, StreamSet, read_config


def load(name: str, folder: Path, decoder: Decoder, target: str, mark: str) -> Application:
    """Load a set for a target whose checkpoint has the fingerprint ``mark``; errors as of `load_applications`."""
    what = f"application {name!r} ({folder})"
    config = read_config(folder)
    if config.mode != "shared":
        raise ConfigError(
            what,
            "the set was trained in lossless mode: it drafts for the base model and does not change its answers",
            f"draft with it: drafter='streams:{folder}', or train it with mode='shared'",
        )
    check_target(what, config, target, decoder.config, mark)
    streams, digest = StreamSet.load(folder, dtype=decoder.dtype, device=decoder.device), hashlib.sha256()
    for file in (CONFIG_FILE, WEIGHTS_FILE):
        content = (folder / file).read_bytes()
        digest.update(len(content).to_bytes(8, "little") + content)
    return make_application(name, streams, decoder, digest.hexdigest())


def make_application(name: str, trained: StreamSet, decoder: Decoder, identity: str) -> Application:
    """Make an application of a set in memory, whose parameters have the decoder's dtype and device.

    Raises:
        CapabilityError: adapters of other widths than the target's linear layers.
    """
    adapter, gamma = trained.adapters, trained.config.gamma
    if adapter is not None:
        shapes = linear_shapes(decoder.config)
        for layer, linear, down, up in adapter.pairs():
            if (sizes := (down.shape[1], up.shape[0])) != shapes[linear]:
                raise CapabilityError(
                    f"application {name!r}",
                    f"the adapter of layer {layer}, {linear} is for {sizes[0]} inputs and {sizes[1]} outputs, "
                    f"the target has {shapes[linear][0]} and {shapes[linear][1]}",
                    "use a set that was trained for this target",
                )
        if decoder.stack is None:
            adapter.prepare(exact=decoder.exact)
    return Application(name=name, identity=identity, adapter=adapter, beside=trained if gamma else None, rows=gamma)
