"""Streams at the end of the context: stream j of the row at position t has position t + j, which no main row has.

A table of fixed extent, as other devices than the CPU have it, must hold those positions before they come.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kits.tiny import assemble, run, streams, tiny_application, tiny_config, tiny_decoder, tiny_streams

from paceline.core.sampling import SamplingParams
from paceline.engine.engine import Engine
from paceline.model.decoder import Decoder
from paceline.model.rope import RopeTable, RopeTables

CONTEXT = 1024  # whole blocks of the table: nothing lies behind it by chance
CONFIG = tiny_config(max_position=CONTEXT)
GAMMA = 5
PROMPT = [(7 * i) % 89 for i in range(CONTEXT - 12)]
TO_THE_END = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


def table(fixed: bool) -> RopeTables:
    return RopeTables(CONFIG.rotations, CONTEXT, torch.float64, torch.device("cpu"), fixed=fixed)


def decoder_with(fixed: bool) -> tuple[Decoder, list[int]]:
    """A target, and the largest position of each of its passes."""
    decoder, seen = tiny_decoder(CONFIG), []
    decoder._rope = made = table(fixed)
    look_up = made.rows

    def rows(positions: torch.Tensor) -> Any:
        seen.append(int(positions.max()))
        return look_up(positions)

    made.rows = rows  # type: ignore[method-assign]
    return decoder, seen


def engine(decoder: Decoder, mode: str, at: str) -> Engine:
    if mode == "shared":
        trained = tiny_streams(CONFIG, mode="shared", gamma=GAMMA)
        applications = [tiny_application("app", decoder, trained)]
        return assemble(streams(at=at, k=1), decoder=decoder, max_model_len=CONTEXT, applications=applications)
    trained = tiny_streams(CONFIG, gamma=GAMMA)
    return assemble(streams(at=at, k=1, trained=trained), decoder=decoder, max_model_len=CONTEXT)


@pytest.mark.parametrize("at", ["nodes", "frontier"])
@pytest.mark.parametrize("mode", ["lossless", "shared"])
def test_streams_of_the_last_rows_are_in_the_table(mode: str, at: str) -> None:
    found = []
    for fixed in (False, True):
        decoder, seen = decoder_with(fixed)
        made = engine(decoder, mode, at)
        (output,) = run(made, [(PROMPT, TO_THE_END)], ["app"] if mode == "shared" else None)
        assert made.round.failure is None and max(seen) >= CONTEXT, "no stream lay beyond the context"
        found.append((output.outputs[0].token_ids, output.stats.passes, output.stats.drafted, output.stats.accepted))
    assert found[0] == found[1] and len(found[0][0]) == 12


def test_a_fixed_table_does_not_grow_by_itself() -> None:
    """The test above can fail."""
    rope, device = CONFIG.rope, torch.device("cpu")
    assert rope is not None
    fixed, grown = (RopeTable(rope, CONTEXT, torch.float64, device, fixed) for fixed in (True, False))
    inside, beyond = torch.tensor([3, CONTEXT - 1]), torch.tensor([CONTEXT])
    with pytest.raises(IndexError):
        fixed.rows(beyond)
    grown.expect(5000)
    assert len(fixed.now) == CONTEXT and len(grown.now) == 0, "a growing table has no need to know"
    assert all(torch.equal(a, b) for a, b in zip(fixed.rows(inside), grown.rows(inside), strict=True))
    fixed.expect(CONTEXT)
    assert all(torch.equal(a, b) for a, b in zip(fixed.rows(beyond), grown.rows(beyond), strict=True))
