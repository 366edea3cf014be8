"""Row-layers against what the layers are really given: every call of them is watched, and its rows are counted."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from kits.native import needs_kernels
from kits.tiny import assemble, run, streams, tiny_application, tiny_config, tiny_decoder, tiny_streams

from paceline.core.sampling import SamplingParams
from paceline.engine.engine import Engine
from paceline.kernels.calls import TokenPass
from paceline.kernels.layers import Stack
from paceline.model.adapters import AdapterConfig
from paceline.model.attention.base import slot_indices
from paceline.model.base import KVCache
from paceline.model.decoder import Decoder
from paceline.papers.streaming.model import StreamSet
from paceline.papers.streaming.native import StreamRun, decide_streams

SHAPE = tiny_config(num_layers=5, windows=(None, 24, None, None, None))
GAMMA, LAYERS = 3, 2
INSERTION = 5 - LAYERS
PROMPTS = [[*range(20, 62)], [*range(30, 41)], [8]]
GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
TREE: dict[str, Any] = {"k": 10, "nodes": 14}
SETTINGS: dict[str, dict[str, Any]] = {
    "frontier": TREE,
    "chain at frontier": {"chain": True},
    "nodes": {**TREE, "at": "nodes"},
    "pruned": {**TREE, "at": "nodes", "prune_threshold": 0.004},
    "pruned at frontier": {**TREE, "prune_count": 5},
}


class Layers:
    """Counts rows times layers of one decoder, sequence by sequence where one runs at a time.

    Roots, nodes and their streams count; rows of a prompt before its last do not. Slots say whose a row is: those of
    streams lie behind the pool's last block.
    """

    def __init__(self, decoder: Decoder, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.row_layers = self.upper = 0
        self._of_step: Counter[bool] = Counter()  # upper rows of the step under way, by whether they are streams
        layers, step = decoder.run_layers, engine.round.step

        def counted(state: Any, start: int, stop: int, *given: Any) -> Any:
            live = [(one.prompt_ids, s.cache) for one in engine.live.values() for s in one.sequences if s.cache]
            roots = {block: len(prompt) - 1 for prompt, cache in live for block in cache.blocks}
            slots = slot_indices(state.slots, decoder.device).tolist()
            of_streams = [slot >= engine.pool.num_tokens for slot in slots]
            places = zip(slots, of_streams, state.positions.tolist(), strict=True)
            rows = [stream or place >= roots[slot // engine.pool.block_size] for slot, stream, place in places]
            for layer in range(start, stop):
                self.row_layers += sum(rows)
                if layer >= INSERTION:
                    self._of_step.update(stream for row, stream in zip(rows, of_streams, strict=True) if row)
            return layers(state, start, stop, *given)

        def stepped(*given: Any) -> Any:
            self._of_step.clear()
            done = step(*given)
            if self._of_step[True]:
                self.upper += self._of_step.total()
            return done

        monkeypatch.setattr(decoder, "run_layers", counted)
        monkeypatch.setattr(engine.round, "step", stepped)


def play(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch, trained: StreamSet | None, **limits: Any
) -> tuple[Layers, list[Any]]:
    """Watched layers and the statistics of some answers."""
    decoder = tiny_decoder(SHAPE)
    apps = [] if trained is None else [tiny_application("one", decoder, trained)]
    drafter = streams(trained=tiny_streams(SHAPE, gamma=GAMMA, layers=LAYERS), **options)
    engine = assemble(drafter, decoder=decoder, applications=apps, **limits)
    watched = Layers(decoder, engine, monkeypatch)
    outputs = run(engine, [(p, GREEDY) for p in PROMPTS], ["one" if apps else None] * len(PROMPTS))
    assert engine.round.failure is None  # type: ignore[attr-defined]
    return watched, [o.stats for o in outputs]


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("name", SETTINGS)
def test_row_layers_are_rows_times_layers(name: str, shared: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """One sequence at a time, so that every row is known to be its own."""
    trained = tiny_streams(SHAPE, mode="shared", gamma=GAMMA, layers=LAYERS) if shared else None
    watched, stats = play(SETTINGS[name], monkeypatch, trained, max_sequences=1)
    assert watched.row_layers == sum(s.row_layers for s in stats)
    assert watched.upper == sum(s.upper_row_layers for s in stats)
    assert sum(s.accepted for s in stats) and all(s.upper_row_layers for s in stats)
    assert all(bool(s.pruned) == ("pruned" in name) for s in stats)
    assert all(bool(s.rode) == (shared or "frontier" not in name) for s in stats)


@needs_kernels
@pytest.mark.parametrize("ride", [(9.0, 0.0), (0.25, 0.07), (0.0, 0.0)], ids=["late", "some", "all"])
@pytest.mark.parametrize("at", ["frontier", "nodes"])
def test_row_layers_of_compiled_passes(at: Any, ride: tuple[float, float], monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiled call is watched in the same way: the rows that it is given, and the streams that it runs."""
    monkeypatch.setattr("paceline.papers.streaming.compiled.stream_prices", lambda *_: ride)
    shape = tiny_config(head_dim=16, num_layers=5, windows=(None,) * 5)
    decoder = tiny_decoder(shape, dtype=torch.float32, compiled=True)
    adapter = AdapterConfig(rank=4, layers=(3, 4))
    trained = tiny_streams(shape, dtype=torch.float32, gamma=GAMMA, layers=LAYERS, adapter=adapter)
    engine = assemble(streams(trained=trained, at=at, **TREE), decoder=decoder, max_sequences=1)
    assert decoder.stack is not None
    counts = Counter[str]()
    without = decoder.stack.decide

    def watched(stack: Stack, asked: TokenPass, riding: StreamRun, cache: KVCache, taps: None) -> Any:
        wanted, done = asked.wanted, decide_streams(stack, asked, riding, cache, taps)
        late = sum(
            carrier.streams for carrier, told in zip(riding.carriers, done[1], strict=True) if told and not told.rode
        )
        rows = sum(len(carrier.riders) * carrier.streams for carrier in riding.carriers) + late
        counts.update({"row_layers": 5 * len(wanted) + LAYERS * rows, "late": late})
        counts["upper"] += LAYERS * (len(wanted) + rows) * bool(rows)
        return done

    def plain(asked: TokenPass, cache: KVCache, taps: None) -> Any:
        counts["row_layers"] += 5 * len(asked.wanted)
        return without(asked, cache, taps)

    monkeypatch.setattr("paceline.papers.streaming.round.decide_streams", watched)
    monkeypatch.setattr(decoder.stack, "decide", plain)
    stats = [o.stats for o in run(engine, [(p, GREEDY) for p in PROMPTS])]
    assert engine.round.failure is None  # type: ignore[attr-defined]
    assert counts["row_layers"] == sum(s.row_layers for s in stats)
    assert counts["upper"] == sum(s.upper_row_layers for s in stats) > 0
    rode = sum(s.rode for s in stats)
    assert bool(rode) == (at == "nodes" or ride[0] < 9.0) and (counts["late"] or rode)
