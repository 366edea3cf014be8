"""The drafter that reads streams: product trees, pruning rules, options, the lossy verifier, and its round."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from kits.tiny import assemble, run, streams, tiny_config, tiny_decoder, tiny_streams

from paceline import LLM
from paceline.core.errors import CapabilityError
from paceline.core.sampling import SamplingParams
from paceline.draft.levels import best_nodes
from paceline.draft.registry import DrafterContext
from paceline.model.adapters import AdapterConfig
from paceline.papers.streaming.drafter import StreamsConfig, StreamsDrafter
from paceline.papers.streaming.pruning import surviving
from paceline.weights.files import fingerprint
from paceline.weights.source import read_config, resolve_folder

GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
PROMPT = [*range(20, 50)]


@pytest.mark.parametrize(("depth", "k"), [(1, 1), (1, 4), (3, 1), (3, 3), (4, 2)])
def test_best_nodes_are_the_best_of_the_whole_tree(depth: int, k: int) -> None:
    draw = random.Random(depth * 10 + k)
    for _ in range(20):
        log_q = [sorted((math.log(draw.random()) for _ in range(k)), reverse=True) for _ in range(depth)]
        tokens = [draw.sample(range(100), k) for _ in range(depth)]
        every = {
            path: sum(log_q[level][rank] for level, rank in enumerate(path))
            for d in range(1, depth + 1)
            for path in itertools.product(range(k), repeat=d)
        }
        budget = draw.randint(1, len(every) + 2)
        made = best_nodes(tokens, log_q, budget)
        assert len(made) == min(budget, len(every))
        assert made.scores == sorted(made.scores, reverse=True)
        assert made.scores == pytest.approx(sorted(every.values(), reverse=True)[:budget])
        paths: list[tuple[int, ...]] = [()]
        for parent, token in zip(made.parents, made.tokens, strict=True):
            paths.append((*paths[parent], token))
        assert len({*paths}) == len(paths)  # no path twice
        for path, score in zip(paths[1:], made.scores, strict=True):
            ranks = tuple(tokens[level].index(token) for level, token in enumerate(path))
            assert score == pytest.approx(every[ranks])


def test_a_threshold_takes_whole_subtrees() -> None:
    parents, transitions = [0, 0, 1, 2, 3], [*map(math.log, (0.5, 0.01, 0.3, 0.9, 0.05))]
    assert surviving(parents, transitions, 0.1, None) == [1, 3]
    assert surviving(parents, transitions, 0.04, None) == [1, 3, 5]
    assert surviving(parents, transitions, 0.6, None) == []


def test_fewer_streams_say_what_they_said() -> None:
    """Streams 1 .. j never see later ones."""
    trained, decoder = tiny_streams(), tiny_decoder()
    told = []
    for gamma in (3, 2):
        drafter = streams(trained=trained, gamma=gamma, k=2, nodes=2)
        run(assemble(drafter, decoder=decoder), [(PROMPT, SamplingParams(temperature=0, max_tokens=2))])
        spy: list[torch.Tensor] = []
        observe = drafter.observe
        drafter.observe = lambda s, o=observe, y=spy: (y.extend(x for x in s.levels if x is not None), o(s))  # type: ignore[method-assign]
        run(assemble(drafter, decoder=decoder), [(PROMPT, GREEDY)])
        told.append(spy[0])
    assert torch.allclose(told[0][:2], told[1], atol=1e-9)


def test_a_set_of_another_target() -> None:
    for changes, field in (
        ({"num_layers": 4}, "num_layers"),
        ({"d_model": 48}, "d_model"),
        ({"vocab_size": 90}, "vocab_size"),
    ):
        with pytest.raises(CapabilityError, match=f"and has {field}"):
            assemble(streams(target={"config": tiny_config(**changes)}))


def test_a_set_of_other_weights(tmp_path: Path) -> None:
    made = tiny_streams()
    made.config = replace(made.config, fingerprint="abc", target="that one")
    made.save(tmp_path / "set")
    target = tmp_path / "target"
    target.mkdir()
    (target / "config.json").write_text("{}")
    from safetensors.torch import save_file

    save_file({"w": torch.zeros(4)}, target / "model.safetensors")
    config = StreamsConfig(path=str(tmp_path / "set"))
    with pytest.raises(CapabilityError, match="trained for that one, whose weights differ from those of this one"):
        config.build(DrafterContext(target_folder=target, target="this one"))
    assert isinstance(config.build(DrafterContext(dtype=torch.float64)), StreamsDrafter)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random set for the embedded target."""
    place = tmp_path_factory.mktemp("streams")
    shape = read_config(resolve_folder("paceline-small"))
    layers = tuple(range(shape.num_layers - 2, shape.num_layers))
    adapter = AdapterConfig(rank=8, layers=layers)
    made = tiny_streams(shape, layers=2, gamma=4, size=0.05, dtype=torch.float32, adapter=adapter)
    made.config = replace(made.config, fingerprint=fingerprint(resolve_folder("paceline-small")))
    made.save(place)
    return place


def test_a_set_drafts_by_its_folder_alone(folder: Path) -> None:
    """No round need be named, and the ids are those of plain decoding."""
    options: dict[str, Any] = {"budget": 12, "kernels": "torch", "exact": True}
    common: dict[str, Any] = {"max_model_len": 128, "max_sequences": 4}
    kernels = {k: v for k, v in options.items() if k != "budget"}
    prompts = ["Once upon a time", "SELECT name FROM"]
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    plain = LLM("paceline-small", **common, **kernels)
    drafting = LLM("paceline-small", share=plain, drafter=f"streams:{folder},nodes=12", **common, **options)
    wanted, found = (m.generate(prompts, params) for m in (plain, drafting))
    assert [o.outputs[0].token_ids for o in found] == [o.outputs[0].token_ids for o in wanted]
    assert drafting.engine.round.name == "fused" and drafting.engine.round.failure is None
    assert sum(o.stats.drafted for o in found)
