"""Speculative Streaming against its references: shared sets, both places of streams, and the bits of main rows.

The reference of a shared set recomputes the whole text for every token, in one dense pass: every generated
row with exactly gamma streams, no prompt row before the last with any.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kits.tiny import assemble, run, streams, tiny_application, tiny_config, tiny_decoder, tiny_streams
from torch import Tensor

from paceline import kernels
from paceline.core.sampling import SamplingParams, SequenceSampler
from paceline.draft.base import StepFeatures
from paceline.engine.engine import Engine
from paceline.engine.passes import Pass
from paceline.model.adapters import AdapterConfig, AdapterRange
from paceline.model.attention.base import Segment
from paceline.model.base import Batch, ForwardState
from paceline.model.decoder import Decoder
from paceline.papers.streaming import round
from paceline.papers.streaming.model import StreamSet
from paceline.papers.streaming.pruning import surviving

LONG = [*range(20, 62)]
PROMPTS = [LONG, [*range(30, 41)], [8], [*LONG[:34], 3, 9]]
GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
HOT = SamplingParams(temperature=0.9, seed=4, max_tokens=20, ignore_eos=True)
SETS: dict[str, dict[str, Any]] = {"plain": {}, "deep": {"layers": 2, "gamma": 2}, "bare": {"adapter": None}}


@cache
def target() -> Decoder:
    return tiny_decoder(tiny_config())


@cache
def shared(name: str) -> StreamSet:
    return tiny_streams(mode="shared", **SETS[name])


def room(decoder: Decoder, size: int) -> Any:
    """K and V of so many rows."""
    c = decoder.config
    shape = (c.num_kv_heads, size, c.head_dim)
    return SimpleNamespace(**{n: [torch.zeros(shape, dtype=decoder.dtype) for _ in range(c.num_layers)] for n in "kv"})


@torch.inference_mode()
def shared_logits(trained: StreamSet, tokens: Sequence[int], prompt_len: int) -> Tensor:
    """[V]: what comes after ``tokens``, with gamma streams on every row from the prompt's last on."""
    decoder, c = target(), trained.config
    count, carriers = len(tokens), len(tokens) - prompt_len + 1
    size = count + carriers * c.gamma
    pool = room(decoder, size)
    lower = lay_out(decoder, list(range(count)), torch.ones(count, count, dtype=torch.bool).tril())
    batch = Batch(torch.tensor(tokens), lower.positions, lower.slots, lower.attn)
    state = decoder.embed(batch)
    state.adapters = ranges(trained, count)
    decoder.run_layers(state, 0, c.insertion, pool)
    begun = [state.hidden]
    places, owners, numbers = [*range(count)], [*range(count)], [0] * count
    for row in range(prompt_len - 1, count):
        begun.append(trained.begin(state.hidden[row : row + 1])[0])
        places += [row + j for j in range(1, c.gamma + 1)]
        owners += [row] * c.gamma
        numbers += range(1, c.gamma + 1)
    upper = lay_out(decoder, places, sight(owners, numbers))
    upper.hidden, upper.adapters = torch.cat(begun), ranges(trained, size)
    decoder.run_layers(upper, c.insertion, c.num_layers, pool)
    return decoder.logits(upper)[count - 1]


def sight(owners: Sequence[int], numbers: Sequence[int]) -> Tensor:
    """[rows, rows] bool by the equations: a main row sees main rows up to itself and its own streams (eq. 3),
    a stream what its main row sees of main rows, and streams 1 .. j of it (eq. 2)."""
    rows = range(len(owners))
    return torch.tensor(
        [
            [
                (numbers[b] == 0 and owners[b] <= owners[a])
                or (numbers[b] > 0 and owners[b] == owners[a] and (numbers[a] == 0 or numbers[b] <= numbers[a]))
                for b in rows
            ]
            for a in rows
        ]
    )


def lay_out(decoder: Decoder, places: Sequence[int], visible: Tensor) -> ForwardState:
    """A state of rows at ``places``, all of them in one block."""
    size, positions = len(places), torch.tensor(places)
    segment = Segment(0, size, slice(0, size), size, 0, visible, positions)
    zeros = torch.zeros_like(positions)
    return ForwardState(zeros, positions, slice(0, size), decoder.plan([segment], positions))


def ranges(trained: StreamSet, rows: int) -> list[AdapterRange]:
    return [] if trained.adapters is None else [AdapterRange(0, rows, trained.adapters)]


@cache
def reference(name: str, prompt: int, hot: bool) -> list[int]:
    """The ids that plain decoding of a shared set gives."""
    params, ids = HOT if hot else GREEDY, list(PROMPTS[prompt])
    sampler = SequenceSampler(params, ids, seed=params.seed or 0, sample_index=0, vocab_size=96)
    for _ in range(params.max_tokens or 0):
        logits = shared_logits(shared(name), ids, len(PROMPTS[prompt]))[None]
        ids.append(int(sampler.choose(logits, None, [len(ids)])))
        sampler.commit(ids[-1:])
    return ids[len(PROMPTS[prompt]) :]


CONDITIONS: dict[str, dict[str, Any]] = {
    "together": {},
    "one by one": {"max_sequences": 1},
    "few rows": {"max_batch_rows": 9},
    "tight pool": {"kv_tokens": 132, "block_size": 4, "max_model_len": 120},
}


PRUNING: list[dict[str, Any]] = [{}, {"prune_count": 6}, {"prune_threshold": 0.004}]


@pytest.mark.parametrize("hot", [False, True])
@pytest.mark.parametrize("name", SETS)
def test_a_shared_set_answers_as_its_reference(name: str, hot: bool) -> None:
    """Batches, chunk edges, preemption, prefix hits and a budget of zero change no id."""
    wanted = [reference(name, i, hot) for i in range(len(PROMPTS))]
    assert len({tuple(ids) for ids in wanted}) == len(PROMPTS)
    met = {"preempted": 0, "found": 0, "accepted": 0}
    for number, (condition, options) in enumerate(CONDITIONS.items()):
        app = tiny_application("one", target(), shared(name))
        pruning = PRUNING[number % len(PRUNING)]
        drafter = streams(k=10, nodes=14, target={"config": target().config}, **pruning)
        engine = assemble(drafter, decoder=target(), applications=[app], budget=14 * (number != 1), **options)
        outputs = run(engine, [(p, HOT if hot else GREEDY) for p in PROMPTS * 2], ["one"] * len(PROMPTS) * 2)
        assert [o.outputs[0].token_ids for o in outputs] == wanted * 2, condition
        assert engine.round.failure is None
        met["preempted"] += sum(o.stats.preemptions for o in outputs)
        met["found"] += sum(o.stats.cached_prompt_tokens for o in outputs)
        met["accepted"] += sum(o.stats.accepted for o in outputs)
    assert all(met.values()), met


def test_generated_rows_are_no_prefix_of_a_longer_prompt() -> None:
    """Rows with streams have other K/V than the same tokens in a prompt: no block of them may be found."""
    app = tiny_application("one", target(), shared("plain"))
    engine = assemble(streams(k=8, nodes=8), decoder=target(), applications=[app], block_size=4)
    prompt = PROMPTS[0][:18]
    first = run(engine, [(prompt, GREEDY)], ["one"])[0].outputs[0].token_ids
    longer = [*prompt, *first]
    again = run(engine, [(longer, GREEDY)], ["one"])[0]
    alone = assemble(streams(k=8, nodes=8), decoder=target(), applications=[app])
    assert again.outputs[0].token_ids == run(alone, [(longer, GREEDY)], ["one"])[0].outputs[0].token_ids
    assert again.stats.cached_prompt_tokens == 16  # whole blocks before the first prompt's last row


def test_sets_of_several_depths_in_one_pass() -> None:
    """Two applications and the base model, whose streams begin at different layers, with pruning."""
    apps = [tiny_application(n, target(), shared(n)) for n in ("plain", "deep")]
    for at in ("nodes", "frontier"):
        drafter = streams(k=10, nodes=14, at=at, prune_threshold=0.004)
        engine = assemble(drafter, decoder=target(), applications=apps)
        names = ["plain", "deep", None, "deep"]
        outputs = run(engine, [(p, GREEDY) for p in PROMPTS], names)
        plain = run(assemble(decoder=target()), [(PROMPTS[2], GREEDY)])[0]
        assert outputs[2].outputs[0].token_ids == plain.outputs[0].token_ids
        for i in (0, 1, 3):
            assert outputs[i].outputs[0].token_ids == reference(str(names[i]), i, False)
        assert all(o.stats.pruned for o in outputs)


def heard(
    drafter: Any, application: str | None = None, in_parts: bool = False, **options: Any
) -> tuple[list[list[int]], list[Tensor]]:
    """Answers, and all stream logits that the drafter was told, in order; ``in_parts``: not in one compiled call."""
    told: list[Tensor] = []
    observe = drafter.observe

    def listen(step: StepFeatures) -> None:
        told.extend(x.clone() for x in step.levels if x is not None)
        observe(step)

    drafter.observe = listen
    engine: Any = assemble(drafter, **{"decoder": target()} | options)
    engine.round.compiled &= not in_parts
    outputs = run(engine, [(p, GREEDY) for p in PROMPTS], [application] * len(PROMPTS))
    assert engine.round.failure is None and told
    return [o.outputs[0].token_ids for o in outputs], told


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("pruning", [*PRUNING, {"prune_threshold": 0.003}])
def test_streams_say_the_same_on_nodes_and_on_the_frontier(name: str, pruning: dict[str, Any]) -> None:
    """Main rows of a lossless set never see streams, so those of one node depend on no other's."""
    trained = tiny_streams(**SETS[name])
    told = {}
    for at in ("nodes", "frontier"):
        drafter = streams(trained=trained, k=10, nodes=16, at=at, **pruning)
        told[at] = heard(drafter, max_batch_rows=30)
    assert told["nodes"][0] == told["frontier"][0]
    assert len(told["nodes"][1]) == len(told["frontier"][1])
    for a, b in zip(told["nodes"][1], told["frontier"][1], strict=True):
        assert torch.allclose(a, b, rtol=0, atol=1e-9)


@pytest.mark.parametrize("layers", [1, 2])
def test_what_is_pruned_is_what_the_early_exit_finds_unlikely(layers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every node's score is recomputed from its own text alone."""
    trained = tiny_streams(layers=layers)
    cuts: list[tuple[list[int], list[int], list[int], list[int]]] = []  # text, and the tree with what is kept of it
    prune = round.prune

    def watched(p: Pass, *given: Any) -> bool:
        tree = p.spans[0].tree
        assert tree is not None
        done = prune(p, *given)
        cuts.append(([*p.works[0].sequence.tokens], [-1, *tree.tokens], [-1, *tree.parents], p.remaining.get(0, [])))
        return done

    monkeypatch.setattr(round, "prune", watched)
    options = {"prune_count": 4, "prune_threshold": 1e-4}
    engine = assemble(streams(trained=trained, k=6, nodes=9, at="nodes", **options), decoder=target())
    assert run(engine, [(PROMPTS[1], GREEDY)])[0].stats.pruned
    assert len(cuts) > 5
    layer, to_exit = trained.config.insertion, trained.prune_map
    for text, tokens, parents, kept in cuts:
        scores = [transition(text, tokens, parents, node, layer, to_exit) for node in range(1, len(tokens))]
        wanted = [0, *surviving(parents[1:], scores, 1e-4, 4)]
        assert kept == wanted or (not kept and len(wanted) == len(tokens))


@torch.inference_mode()
def transition(
    text: Sequence[int], tokens: Sequence[int], parents: Sequence[int], node: int, layer: int, to_exit: Any
) -> float:
    """log p of a node given its parent, from a dense pass over the parent's text up to ``layer``."""
    path = []
    above = parents[node]
    while above > 0:
        path.append(tokens[above])
        above = parents[above]
    said = [*text, *reversed(path)]
    decoder, count = target(), len(said)
    state = lay_out(decoder, range(count), torch.ones(count, count, dtype=torch.bool).tril())
    batch = Batch(torch.tensor(said), state.positions, state.slots, state.attn)
    hidden = decoder.run_layers(decoder.embed(batch), 0, layer, room(decoder, count)).hidden[-1:]
    return float(decoder.read(to_exit(hidden)).log_softmax(-1)[0, tokens[node]])


def test_no_streams_where_nobody_drafts() -> None:
    """Off is free: with a budget of 0 no row of a lossless set carries a stream once the prompt is through."""
    engine = assemble(streams(k=3), decoder=target(), budget=0)
    outputs = run(engine, [(p, GREEDY) for p in PROMPTS])
    assert all(o.stats.upper_row_layers == 0 for o in outputs)
    assert all(o.stats.row_layers == o.stats.passes * target().num_layers for o in outputs)


WIDE = tiny_config(head_dim=16)
KINDS = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def logits_by_place(
    engine: Engine, prompts: Sequence[Sequence[int]], application: str | None = None
) -> dict[tuple[int, int], Tensor]:
    """The target's logits after every token that came out, by request and position."""
    found: dict[tuple[int, int], Tensor] = {}
    round_: Any = engine.round
    emit = round_.emitter.emit

    def watched(p: Pass) -> None:
        for i in p.generating:
            view = p.works[i].sequence
            for depth, node in enumerate([0, *p.paths[i]]):
                found[view.key, len(view.tokens) + depth] = p.logits[p.rows[i]][node].clone()
        emit(p)

    round_.emitter.emit = watched
    round_.compiled = False  # the pass in one call shows no logits
    run(engine, [(p, GREEDY) for p in prompts], [application] * len(prompts))
    assert round_.failure is None
    return found


@pytest.mark.parametrize("at", ["nodes", "frontier"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("compiled", [False, True])
def test_main_rows_have_the_bits_of_plain_decoding(compiled: bool, kind: str, at: str) -> None:
    """Row by row, whatever rides along."""
    if compiled and kernels.unavailable():
        pytest.skip(str(kernels.unavailable()))
    decoder = tiny_decoder(WIDE, dtype=KINDS[kind], exact=not compiled, compiled=compiled)
    shape = decoder.config
    prompts = [[t % shape.vocab_size for t in p] for p in PROMPTS]
    layers = (shape.num_layers - 1,)
    trained = tiny_streams(shape, dtype=KINDS[kind], adapter=AdapterConfig(rank=4, layers=layers))
    plain = logits_by_place(assemble(decoder=decoder, max_model_len=120), prompts)
    drafter = streams(trained=trained, k=8, nodes=12, at=at, prune_count=9)
    engine = assemble(drafter, decoder=decoder, max_model_len=120)
    in_streams = logits_by_place(engine, prompts)
    assert plain.keys() <= in_streams.keys()
    assert all(torch.equal(plain[place], in_streams[place]) for place in plain)


@pytest.mark.parametrize(("compiled", "kind"), [(False, "float32"), (True, "float32"), (True, "bfloat16")])
def test_rows_of_a_shared_set_have_bits_of_their_own(compiled: bool, kind: str) -> None:
    """Alone without drafts, or in a batch with drafts, few rows a pass and preemption: the same logits, bit for bit."""
    if compiled and kernels.unavailable():
        pytest.skip(str(kernels.unavailable()))
    decoder = tiny_decoder(WIDE, dtype=KINDS[kind], exact=not compiled, compiled=compiled)
    trained = tiny_streams(WIDE, dtype=KINDS[kind], mode="shared", layers=2)
    app = tiny_application("one", decoder, trained)

    def logits(prompts: Sequence[Sequence[int]], budget: int, **options: Any) -> dict[tuple[int, int], Tensor]:
        target_of = {"config": WIDE, "dtype": KINDS[kind]}
        drafter = streams(target=target_of, k=8, nodes=12, prune_count=9)
        engine = assemble(
            drafter, decoder=decoder, applications=[app], budget=budget, max_model_len=120, block_size=4, **options
        )
        return logits_by_place(engine, prompts, "one")

    alone = [logits([prompt], 0) for prompt in PROMPTS]
    wanted = {(i, place): row for i, part in enumerate(alone) for (_, place), row in part.items()}
    for options in ({}, {"max_batch_rows": 9}, {"kv_tokens": 132}):
        found = logits(PROMPTS, 12, **options)
        assert wanted.keys() <= found.keys()
        assert all(torch.equal(wanted[place], found[place]) for place in wanted), options


@pytest.mark.parametrize("mode", ["lossless", "shared"])
def test_compiled_streams_say_what_torch_s_say(mode: Any) -> None:
    if kernels.unavailable():
        pytest.skip(str(kernels.unavailable()))
    trained = tiny_streams(WIDE, dtype=torch.float32, mode=mode, layers=2)
    found = []
    for compiled in (True, False):
        decoder = tiny_decoder(WIDE, dtype=torch.float32, compiled=compiled)
        own = None if mode == "shared" else trained
        drafter = streams(target={"config": WIDE, "dtype": torch.float32}, trained=own, k=8, nodes=12, at="nodes")
        apps = [tiny_application("one", decoder, trained)] if mode == "shared" else []
        options = {"decoder": decoder, "applications": apps, "max_model_len": 120}
        found.append(heard(drafter, "one" if apps else None, in_parts=True, **options))
    assert found[0][0] == found[1][0]
    assert len(found[0][1]) == len(found[1][1]) > 20
    assert all(torch.allclose(a, b, rtol=1e-3, atol=2e-3) for a, b in zip(found[0][1], found[1][1], strict=True))
