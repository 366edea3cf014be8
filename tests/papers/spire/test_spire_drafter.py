"""SPIRe: drafts against the whole text computed by hand, what is held, and what is refused."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from kits.draft import paths_of, text, view
from kits.spire import draft_decoder, drafts_by_hand, memory_of, spire, whole
from kits.state import taps_of
from kits.tiny import VOCAB, assemble, run, tiny_application, tiny_config, tiny_decoder
from torch import Tensor

from paceline import kernels
from paceline.core.errors import CapabilityError, ConfigError
from paceline.core.sampling import SamplingParams
from paceline.core.sequence import Sequence
from paceline.draft import registry
from paceline.draft.base import DraftRequest, StepFeatures
from paceline.kv.ring import RingCache
from paceline.kv.views import SinkWindow
from paceline.model.decoder import Decoder
from paceline.model.rope import RopeConfig
from paceline.papers.spire.drafter import SpireConfig, SpireDrafter
from paceline.papers.spire.model import SpireShape, read_memory, read_shape, save_shape
from paceline.papers.spire.network import SpireNetwork

CPU = torch.device("cpu")
VARIANTS: dict[str, dict[str, Any]] = {
    "spire": {},
    "no sinks": {"sinks": 0},
    "narrow": {"window": 1, "sinks": 1},
    "one layer": {"layers": 1},
}


@pytest.fixture(autouse=True)
def no_gradients() -> Iterator[None]:
    with torch.inference_mode():
        yield


def by_hand(drafter: SpireDrafter, target: Decoder, tokens: list[int], path: list[int]) -> list[Tensor]:
    """[V] what the draft says behind the root and each token of a path."""
    net = draft_decoder(target.config, 0, drafter.shape.layers)
    taps = taps_of(target, tokens)
    states = [taps[layer] for layer in range(target.num_layers)]
    found = drafts_by_hand(net, memory_of(drafter.shape), drafter.shape, states, tokens, path)
    assert net.head is not None
    return [net.head.weight @ state for state in found]


def show(drafter: SpireDrafter, target: Decoder, sequence: Sequence, first: int, stop: int) -> None:
    """What a pass over positions first .. stop - 1 of a text shows."""
    taps = taps_of(target, sequence.tokens[:stop])
    hidden = {tap: taps[tap][first:] for tap in drafter.spec.taps}
    drafter.observe(StepFeatures([sequence], [[]], hidden=hidden, hidden_rows=[slice(0, stop - first)], first=[first]))


def bound(drafter: SpireDrafter, target: Decoder, sequences: int = 4) -> SpireDrafter:
    drafter.bind(target.info("tiny"), sequences, 1000, CPU)
    return drafter


@pytest.mark.parametrize("variant", VARIANTS)
def test_drafts_are_those_of_the_formula(variant: str) -> None:
    """A conversation: any path is accepted, then a token of any kind; sometimes a pass shows the end of the text alone,
    as behind a prefix that was found in the cache."""
    draw = random.Random(3)
    target = tiny_decoder(whole())
    drafter = bound(spire(shape=VARIANTS[variant]), target)
    views = [view(text(n, n), key=n) for n in (2, 7, 40)]
    window = drafter.shape.window
    for v in views:  # the first pass: all of the prompt, or its last tokens alone
        prompt = len(v.tokens)
        v.tokens.append(5)
        show(drafter, target, v, 0 if prompt < 20 else prompt - window, prompt)
    depths = set()
    for _ in range(4):
        tree = drafter.draft(DraftRequest(views, [64] * 3, [64] * 3))
        for b, v in enumerate(views):
            found = paths_of(tree, b)
            longest = max(found, key=len)
            depths.add(len(longest))
            said = by_hand(drafter, target, v.tokens, list(longest[:-1]))
            for depth, logits in enumerate(said, 1):
                fresh = logits.log_softmax(0)
                before = found.get(longest[: depth - 1], 0.0)
                token = longest[depth - 1]
                assert found[longest[:depth]] - before == pytest.approx(float(fresh[token]), abs=1e-8)
                assert int(fresh.argmax()) == token
            known = len(v.tokens) - 1
            v.tokens += [*longest[: draw.choice([0, 1, 4])], draw.randrange(VOCAB)]
            show(drafter, target, v, known, len(v.tokens) - 1)
    assert depths == {4}
    drafter.release([v.key for v in views] + [99])
    assert drafter.ring.idle


def test_what_a_text_takes_is_constant() -> None:
    """Bytes at contexts 40, 120 and 400, counted in the slots that are written."""
    target = tiny_decoder(whole())
    drafter = bound(spire(), target)
    ring = drafter.ring
    assert ring.size == 2 + 12 + 4
    used = set()
    for context in (40, 120, 400):
        v = view(text(context, 1), key=context)
        show(drafter, target, v, 0, context - 1)
        drafter.draft(DraftRequest([v], [4], [4]))
        used.add(int((ring.k[0].abs().sum((0, 2)) > 0).sum()))
        for x in (*ring.k, *ring.v):
            x.zero_()
        drafter.release([context])
    assert len(used) == 1
    short = SinkWindow(2, 12)
    with pytest.raises(IndexError):
        made = RingCache((1, 1, 8), short, 4, 1, torch.float32, CPU)
        made.open(), made.open()


def test_answers_under_an_application_are_its_own() -> None:
    """Sinks that no pass has shown are computed with the application's adapters."""
    target = tiny_decoder(whole())
    application = tiny_application("a", target)
    requests = [(text(60, n), SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)) for n in (1, 2)]
    answers = [
        [o.outputs[0].token_ids for o in run(engine, requests, ["a", None])]
        for engine in (
            assemble(decoder=target, applications=[application]),
            assemble(spire(), decoder=target, applications=[application], max_batch_rows=16),
        )
    ]
    assert answers[0] == answers[1]


def texts_shown(drafter: SpireDrafter, target: Decoder, **params: Any) -> list[Sequence]:
    """Three texts behind their first pass; of the longest one the last tokens alone were shown."""
    views = [view(text(n, n), key=n, **params) for n in (2, 9, 40)]
    for v in views:
        v.tokens.append(5)
        known = len(v.tokens) - 1
        show(drafter, target, v, 0 if known < 20 else known - drafter.shape.window, known)
    return views


@pytest.mark.skipif(kernels.unavailable() is not None, reason=str(kernels.unavailable()))
@pytest.mark.parametrize("variant", ["spire", "no sinks", "narrow"])
@pytest.mark.parametrize("proposes", ["point", "coupled"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_compiled_drafts_are_those_of_the_long_way(
    dtype: torch.dtype, proposes: str, variant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same tokens, and to the bit the same K/V, draft after draft, within budgets and above a floor."""
    config = whole(head_dim=8, rope=RopeConfig(dim=4), qk_norm=True)
    target = tiny_decoder(config, dtype=dtype, compiled=True)
    made = {"config": config, "dtype": dtype, "compiled": True, "shape": VARIANTS[variant], "proposes": proposes}
    drafters = [bound(spire(**made), target) for _ in range(2)]
    params = {"temperature": 0.9, "top_p": 0.95} if proposes == "coupled" else {}
    views = [texts_shown(drafter, target, **params) for drafter in drafters][0]
    lengths = set()
    for floor in (0.0, 0.9, 0.0):
        trees = []
        for drafter, compiled in zip(drafters, (True, False), strict=True):
            with monkeypatch.context() as patch:
                if not compiled:
                    patch.setattr("paceline.papers.spire.drafter.compiles", lambda *_: False)
                want = DraftRequest(views, [1, 3, 64], [64, 64, 64], floor=floor)
                with mock.patch.object(SpireNetwork, "roll", autospec=True, side_effect=SpireNetwork.roll) as roll:
                    trees.append((drafter.draft(want), want.passes))
                assert roll.called == compiled
        (fast, passes), (slow, expected) = trees
        assert passes == expected
        for one, other in zip(fast, slow, strict=True):
            assert one.tokens == other.tokens and one.scores == pytest.approx(other.scores, abs=1e-4)
        lengths.add(tuple(1 + len(tree) for tree in fast))
        for b, v in enumerate(views):  # all of a draft is right, or half
            known = len(v.tokens) - 1
            v.tokens += [*fast[b].tokens[: (1 + len(fast[b]) + b) // 2], 7]
            for drafter in drafters:
                show(drafter, target, v, known, len(v.tokens) - 1)
    assert (2, 4, 5) in lengths and len(lengths) > 1


def test_files_hold_what_a_draft_is(tmp_path: Path) -> None:
    shape = SpireShape(layers=2, window=9, target="tiny")
    save_shape(shape, memory_of(shape), tmp_path)
    assert read_shape(tmp_path) == shape
    assert torch.equal(read_memory(shape, tmp_path), memory_of(shape))
    other = SpireShape(layers=3)
    with pytest.raises(ConfigError, match="memory is"):
        read_memory(other, tmp_path)
    (tmp_path / "spire.json").write_text('{"layers": 2, "width": 3}', encoding="utf-8")
    with pytest.raises(ConfigError, match="unknown entry 'width'"):
        read_shape(tmp_path)
    with pytest.raises(ConfigError, match="there is no such folder"):
        read_shape(tmp_path / "nowhere")


def test_targets_that_do_not_fit() -> None:
    for config, wrong in (
        (tiny_config(), "sliding windows of their own"),
        (whole(ropes=(None, RopeConfig(dim=8), None)), "rotate keys in different ways"),
        (whole(d_model=64), "d_model=32, tiny has 64"),
    ):
        with pytest.raises(CapabilityError, match=wrong):
            bound(spire(), tiny_decoder(config))
    with pytest.raises(CapabilityError, match="and the target has 3"):
        SpireDrafter(SpireConfig(path="x"), SpireShape(layers=3), Path("x"), 3)
    for spec, wrong in (("spire:x,depth=0", "depth must be 1"), ("spire:x,extra=3", "no option")):
        with pytest.raises(ConfigError, match=wrong):
            registry.parse(spec)
