"""The compiled layers: torch's numbers, the same bits at every width, and torch itself where they cannot run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from kits.native import (
    BASE,
    KINDS,
    LENGTH,
    MISSING,
    QWEN3,
    SHAPES,
    Text,
    blank_pool,
    decoder_of,
    error,
    forward,
    make,
    needs_kernels,
    tokens_of,
    whole,
)
from kits.tiny import tiny_config
from torch import Tensor

from paceline import LLM, CapabilityError, ConfigError, SamplingParams, kernels
from paceline.kernels.calls import join, pick
from paceline.kernels.layers import Stack, unsupported
from paceline.kernels.linear import NativeLinear, top
from paceline.kv.pool import KVPool
from paceline.model.attention import make_backend
from paceline.model.attention.reference import ReferenceAttention
from paceline.model.base import Taps
from paceline.model.decoder import Decoder
from paceline.model.packing import RowPacker
from paceline.model.rope import RopeConfig
from paceline.weights.loader import load_model
from paceline.weights.source import resolve

sys.path.insert(0, str(Path(__file__).parents[1] / "parity"))
from checkpoints import MAKERS, build  # noqa: E402  (the builders live beside the parity tests)


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    """Sets the number of threads; undone afterwards."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@needs_kernels
@pytest.mark.parametrize("family", sorted(MAKERS))
def test_every_family_gives_the_logits_of_torch(family: str, tmp_path: Path):
    build(family, tmp_path, seed=4)
    reference = ReferenceAttention()
    plain = load_model(resolve(tmp_path, "float32"), attention=reference)
    oracle = whole(plain, tokens_of(plain, 150))
    assert oracle.std() > 0.5
    ours = load_model(resolve(tmp_path, "float32"), attention=reference, native=True)
    for width in (150, 40, 1):
        torch.testing.assert_close(whole(ours, tokens_of(ours, 150), width), oracle, atol=2e-4, rtol=1e-4)
    for dtype in ("bfloat16", "int8"):
        kind = KINDS[dtype]
        torchs = load_model(resolve(tmp_path, dtype), attention=make_backend(kind))
        ours = load_model(resolve(tmp_path, dtype), attention=make_backend(kind), native=True)
        tokens = tokens_of(ours, 150)
        least = error(whole(torchs, tokens), oracle)
        most = 1.3 if dtype == "bfloat16" else 1.6  # beside int8 weights the inputs may be rounded to bytes too
        assert 0 < error(whole(ours, tokens), oracle) < most * least, f"{dtype}: torch's own error is {least:.3f}"


@needs_kernels
@pytest.mark.parametrize("name", SHAPES)
def test_every_shape_gives_the_logits_of_torch(name: str):
    plain = make(SHAPES[name], compiled=False)
    tokens = tokens_of(plain, 70)
    oracle = whole(plain, tokens)
    for width in (70, 17, 1):
        torch.testing.assert_close(whole(decoder_of(name, "float32"), tokens, width), oracle, atol=2e-4, rtol=1e-4)
    if oracle.shape[1] > 1:
        torchs = error(whole(make(SHAPES[name], "bfloat16", compiled=False), tokens), oracle)
        assert 0 < error(whole(decoder_of(name, "bfloat16"), tokens), oracle) < 1.3 * torchs


@needs_kernels
def test_a_wrong_angle_or_window_would_show():
    """The comparisons above can fail: without its scaling or its window the same network differs."""
    plain = make(QWEN3, compiled=False)
    oracle = whole(plain, tokens_of(plain, 70))
    for wrong in ({"rope": RopeConfig(dim=32, theta=100.0)}, {"windows": (None, 23)}, {"norm_eps": 1e-2}):
        other = make(QWEN3 | wrong)
        assert (whole(other, tokens_of(other, 70)) - oracle).abs().max() > 1e-2


@needs_kernels
@pytest.mark.parametrize("kind", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize(("outputs", "inputs"), [(1, 1), (16, 32), (37, 50), (130, 688)])
def test_one_product(kind: str, outputs: int, inputs: int):
    generator = torch.Generator().manual_seed(outputs)
    weight = torch.randn(outputs, inputs, generator=generator).to(KINDS[kind])
    bias = torch.randn(outputs, generator=generator).to(KINDS[kind])
    linear = NativeLinear(weight, bias, "int8" if kind == "int8" else None)
    for rows in (0, 1, 5, 16, 17, 40):
        x = torch.randn(rows, inputs, generator=generator).to(KINDS[kind])
        residual = torch.randn(rows, outputs, generator=generator).to(KINDS[kind])
        exact = x.double() @ weight.double().T + bias.double()
        atol = {"float32": 1e-4, "bfloat16": 0.02, "int8": 0.04}[kind] * inputs**0.5
        torch.testing.assert_close(linear(x).double(), exact, atol=atol, rtol=1e-2)
        torch.testing.assert_close(linear.add(x, residual).double(), exact + residual.double(), atol=atol, rtol=1e-2)
    wrong = torch.float64 if kind == "float32" else torch.float32
    for bad in (torch.zeros(2, inputs, dtype=wrong), torch.zeros(2, inputs + 1, dtype=KINDS[kind])):
        with pytest.raises(ValueError, match="into a product of"):
            linear(bad)


@needs_kernels
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bias", [False, True])
def test_padding_adds_exactly_nothing(kind: str, bias: bool):
    """A feed-forward width of 43 gives the bits of one of 48 whose last five gates, values and inputs are zero."""
    changes = {"d_ff": 43, "mlp_bias": bias}
    narrow, wide = make(changes, kind), make(changes | {"d_ff": 48}, kind, change=_blank_beyond(43))
    other = make(changes | {"d_ff": 48}, kind)
    tokens = tokens_of(narrow, LENGTH)
    assert torch.equal(whole(narrow, tokens), whole(wide, tokens))
    assert torch.equal(whole(narrow, tokens, 1), whole(wide, tokens))
    assert not torch.equal(whole(narrow, tokens), whole(other, tokens))


def _blank_beyond(own: int) -> Callable[[Decoder], None]:
    """Gives a decoder the MLPs of a narrower one, ``own`` wide."""

    def change(decoder: Decoder) -> None:
        source = {}
        make({"d_ff": own, "mlp_bias": decoder.config.mlp_bias}, change=lambda d: source.update(d.state_dict()))
        for name, value in decoder.state_dict().items():
            part = source[name].to(value.dtype)
            if ".up." in name:
                value.zero_().unflatten(0, (2, -1))[:, :own] = part.unflatten(0, (2, -1))
            elif ".down.weight" in name:
                value.zero_()[:, :own] = part
            else:
                value.copy_(part)

    return change


@needs_kernels
@pytest.mark.parametrize("kind", KINDS)
def test_heads_are_padded_in_the_cache_with_zeros(kind: str):
    decoder = decoder_of("heads of 8", kind)
    assert decoder.cache_shape == (2, 4, 16) and make(SHAPES["heads of 8"], compiled=False).cache_shape == (2, 4, 8)
    text = Text(decoder, tokens_of(decoder, 30))
    text.advance(30)
    for part in (*text.pool.k, *text.pool.v):
        written = part[:, text.cache.slots(0, 30)]
        assert (written[..., :8] != 0).all() and (written[..., 8:] == 0).all()


BITS = [("base", kind) for kind in KINDS] + [("qwen3", "bfloat16"), ("heads of 48", "bfloat16")]
BITS += [("gemma3", kind) for kind in KINDS]
BITS += [("heads of 8", "bfloat16"), ("heads of 24 with norms and biases", "int8")]
BITS += [("windows shorter than a tree", kind) for kind in ("float32", "bfloat16")]
each_model = pytest.mark.parametrize(("name", "kind"), BITS)


@cache
def one_by_one(name: str, kind: str, seed: int = 0) -> tuple[list[int], Tensor]:
    """A text and the logits of plain decoding: one row a pass, on one thread."""
    decoder = decoder_of(name, kind)
    tokens = tokens_of(decoder, LENGTH, seed)
    return tokens, whole(decoder, tokens, 1)


@needs_kernels
@each_model
def test_bits_do_not_depend_on_width_nor_on_threads(name: str, kind: str, threads: Callable[[int], None]):
    tokens, alone = one_by_one(name, kind)
    for width in (2, 3, 4, 5, 7, 8, 15, 16, 17, 31, 33, 48, LENGTH):
        assert torch.equal(whole(decoder_of(name, kind), tokens, width), alone), f"{width} rows a pass"
    for count, widths in ((2, (6, 33)), (3, (33, LENGTH))):
        threads(count)
        for width in widths:
            assert torch.equal(whole(decoder_of(name, kind), tokens, width), alone), f"{count} threads, {width} rows"


@needs_kernels
@each_model
def test_bits_do_not_depend_on_the_rest_of_the_batch(name: str, kind: str):
    """Three texts, one of them in scattered slots, in passes of many widths and any order."""
    decoder = decoder_of(name, kind)
    pool = blank_pool(decoder)
    texts = [Text(decoder, one_by_one(name, kind, seed)[0], scattered=seed == 1, pool=pool) for seed in range(3)]
    found: list[list[Tensor]] = [[], [], []]
    widths = torch.Generator().manual_seed(3)
    while any(text.cache.committed < LENGTH for text in texts):
        packer = RowPacker(decoder, decoder.device)
        chosen = []
        for place in torch.randperm(3, generator=widths).tolist():
            wanted = int(torch.randint(0, 20, (), generator=widths))
            rows = min(wanted, LENGTH - texts[place].cache.committed)
            if rows:
                texts[place].pack(packer, rows)
                chosen.append((place, rows))
        if not chosen:
            continue
        parts = forward(decoder, packer, pool).split([rows for _, rows in chosen])
        for (place, rows), part in zip(chosen, parts, strict=True):
            found[place].append(part)
            pool.commit([(texts[place].cache, range(rows))])
    for seed in range(3):
        assert torch.equal(torch.cat(found[seed]), one_by_one(name, kind, seed)[1]), f"text {seed}"


@needs_kernels
@each_model
@pytest.mark.parametrize("scattered", [False, True])
@pytest.mark.parametrize("split", [0, 3])
def test_bits_of_a_path_do_not_depend_on_its_siblings(name: str, kind: str, scattered: bool, split: int):
    """The text runs through a tree of 40 nodes, most of them junk; ``split`` committed keys lie in the block."""
    decoder, prefix = decoder_of(name, kind), 41
    tokens, alone = one_by_one(name, kind)
    text = Text(decoder, tokens, scattered=scattered)
    text.advance(prefix)
    nodes, path = _bushy(tokens[prefix:], 40, decoder)
    depth = [len(n.ancestors) for n in nodes]
    visible = torch.zeros(len(nodes), split + len(nodes), dtype=torch.bool)
    visible[:, :split] = True
    for row, node in enumerate(nodes):
        visible[row, [split + a for a in (*node.ancestors, row)]] = True
    text.cache.reserve(len(nodes))
    packer = RowPacker(decoder, decoder.device)
    packer.add(
        [n.token for n in nodes],
        [prefix + d for d in depth],
        slots=text.cache.slots(prefix, prefix + len(nodes)),
        keys=text.cache.slots(0, prefix + len(nodes)),
        num_keys=prefix + len(nodes),
        prefix=prefix - split,
        visible=visible,
        block_positions=[*range(prefix - split, prefix), *(prefix + d for d in depth)],
    )
    logits = forward(decoder, packer, text.pool)
    assert len(path) >= 6 and path != list(range(len(path)))
    assert torch.equal(logits[path], alone[prefix : prefix + len(path)])
    text.pool.commit([(text.cache, path)])
    assert torch.equal(text.in_passes_of(4), alone[prefix + len(path) :])


class _Node:
    def __init__(self, token: int, ancestors: tuple[int, ...]) -> None:
        self.token, self.ancestors = token, ancestors


def _bushy(tokens: Sequence[int], size: int, decoder: Decoder) -> tuple[list[_Node], list[int]]:
    """A random tree in which ``tokens`` are one path: its nodes, and the places of that path."""
    generator = torch.Generator().manual_seed(1)
    nodes, path = [_Node(tokens[0], ())], [0]
    while len(nodes) < size:
        if int(torch.randint(0, 4, (), generator=generator)) == 0:
            parent, token = path[-1], tokens[len(path)]
            path.append(len(nodes))
        else:
            parent = int(torch.randint(0, len(nodes), (), generator=generator))
            token = int(torch.randint(0, decoder.config.vocab_size, (), generator=generator))
        nodes.append(_Node(token, (*nodes[parent].ancestors, parent)))
    return nodes, path


@needs_kernels
def test_two_threads_run_two_networks_at_once(threads: Callable[[int], None]):
    """And networks of other sizes take turns on one thread: scratch memory is shared between them."""
    threads(2)
    names = ("base", "heads of 256", "heads of 80")
    expected = {n: one_by_one(n, "bfloat16")[1] for n in names}
    wrong: list[str] = []

    def work(order: Sequence[str], width: int) -> None:
        for name in order:
            tokens = one_by_one(name, "bfloat16")[0]
            if not torch.equal(whole(decoder_of(name, "bfloat16"), tokens, width), expected[name]):
                wrong.append(f"{name}, {width} rows a pass")

    work((*names, *names[::-1]), 16)
    workers = [
        threading.Thread(target=work, args=(order * 3, width)) for order, width in ((names, 7), (names[::-1], 30))
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert wrong == []


@needs_kernels
@pytest.mark.parametrize("kind", KINDS)
@torch.inference_mode()
def test_taps_are_the_hidden_states_of_layer_by_layer_runs(kind: str):
    decoder = make({"num_layers": 4, "windows": (None, 24, None, None)}, kind)
    text = Text(decoder, tokens_of(decoder, 33))
    packer = RowPacker(decoder, decoder.device)
    text.pack(packer, 33)
    batch, taps = packer.batch(), Taps(layers=(0, 2, -1))
    start = decoder.embed(batch)
    embedded = start.hidden
    kept = embedded.clone()
    state = decoder.run_layers(start, 0, 4, text.pool, taps)
    assert torch.equal(embedded, kept)
    slow = decoder.embed(batch)
    for index in range(4):
        slow = decoder.run_layers(slow, index, index + 1, text.pool)
        for name in (index, index - 4):
            if name in taps.hidden:
                assert torch.equal(taps.hidden[name], slow.hidden), f"after layer {index}"
    assert sorted(taps.hidden) == [-1, 0, 2] and torch.equal(state.hidden, slow.hidden)
    assert not torch.equal(taps.hidden[0], taps.hidden[2])
    assert torch.equal(decoder.logits(state, torch.tensor([32, 5])), decoder.logits(state)[[32, 5]])


@needs_kernels
@pytest.mark.parametrize("kind", KINDS)
@torch.inference_mode()
def test_no_rows(kind: str):
    decoder = decoder_of("base", kind)
    text = Text(decoder, tokens_of(decoder, 4))
    packer = RowPacker(decoder, decoder.device)
    text.pack(packer, 4)
    state = decoder.embed(packer.batch())
    assert decoder.run_layers(state, 1, 1, text.pool).hidden is state.hidden
    assert decoder.logits(state, torch.tensor([], dtype=torch.int64)).shape == (0, 203)
    state.hidden, state.positions, state.slots = state.hidden[:0], state.positions[:0], slice(0, 0)
    state.attn = decoder.plan([], state.positions)
    assert decoder.run_layers(state, 0, decoder.num_layers, text.pool).hidden.shape == (0, 72)


@needs_kernels
@torch.inference_mode()
def test_positions_beyond_the_table_and_below_zero():
    decoder, plain = make(), make(compiled=False)
    found = []
    for each in (decoder, plain):
        text = Text(each, tokens_of(each, 4))
        packer = RowPacker(each, each.device)
        text.pack(packer, 4)
        batch = packer.batch()
        batch.positions = torch.tensor([1, 2000, 5000, 7])  # not in order; a table has 1024 positions at first
        found.append(each.run_layers(each.embed(batch), 0, 1, text.pool).hidden)
    torch.testing.assert_close(*found, atol=2e-4, rtol=1e-4)
    batch.positions = torch.tensor([1, 2, -1, 3])
    batch.attn = decoder.plan(batch.attn.segments, batch.positions)
    with pytest.raises(ValueError, match="negative position -1"):
        decoder.run_layers(decoder.embed(batch), 0, 1, blank_pool(decoder))


@needs_kernels
@torch.inference_mode()
def test_rows_without_a_slot_leave_the_cache_alone():
    decoder = decoder_of("base", "bfloat16")
    text = Text(decoder, tokens_of(decoder, 9))
    text.advance(4)
    packer = RowPacker(decoder, decoder.device)
    text.pack(packer, 5)
    batch = packer.batch()
    batch.slots = torch.tensor([4, -1, 6, -1, 8])
    for part in (*text.pool.k, *text.pool.v):
        part[:, 4:] = 0
    decoder.run_layers(decoder.embed(batch), 0, decoder.num_layers, text.pool)
    for part in (*text.pool.k, *text.pool.v):
        written = (part != 0).any(dim=-1).any(dim=0)
        assert written.nonzero().flatten().tolist() == [0, 1, 2, 3, 4, 6, 8]


@needs_kernels
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("broken", [torch.nan, torch.inf])
@torch.inference_mode()
def test_a_broken_row_shows_and_breaks_no_other(kind: str, broken: float):
    decoder = decoder_of("base", kind)
    pool = blank_pool(decoder)
    pair = [Text(decoder, one_by_one("base", kind, seed)[0], pool=pool) for seed in (0, 1)]
    packer = RowPacker(decoder, decoder.device)
    for text in pair:
        text.pack(packer, 20)
    state = decoder.embed(packer.batch())
    state.hidden[7] = broken
    logits = decoder.logits(decoder.run_layers(state, 0, decoder.num_layers, pool))
    assert torch.equal(logits[:7], one_by_one("base", kind, 0)[1][:7])
    assert torch.equal(logits[20:], one_by_one("base", kind, 1)[1][:20])
    assert logits[7:20].isnan().all(), "later rows see that key"


@needs_kernels
@pytest.mark.parametrize("kind", KINDS)
def test_a_broken_key_shows(kind: str):
    """K alone: nothing else carries it into the answer. Masked, it changes nothing."""
    tokens, alone = one_by_one("base", kind)
    text = Text(decoder_of("base", kind), tokens)
    text.advance(50)
    kept = text.pool.k[0][:, 7].clone()
    text.pool.k[0][:, 7] = torch.nan
    assert text.advance(1).isnan().all()
    text.rewind(50)
    text.pool.k[0][:, 7] = kept
    text.pool.k[1][:, 7] = torch.nan  # layer 1 sees the last 24 keys
    assert torch.equal(text.advance(1), alone[50:51])


@needs_kernels
@torch.inference_mode()
def test_a_cache_of_another_kind_is_refused():
    decoder = decoder_of("base", "bfloat16")
    text = Text(decoder, tokens_of(decoder, 3))
    packer = RowPacker(decoder, decoder.device)
    text.pack(packer, 3)
    c = decoder.config
    wide = KVPool(c.num_layers, c.num_kv_heads, c.head_dim, 64, torch.float32, decoder.device)
    apart = KVPool(c.num_layers, c.num_kv_heads, c.head_dim * 2, 64, decoder.dtype, decoder.device)
    for pool in (wide, apart):
        with pytest.raises(ValueError, match="under a model of torch.bfloat16"):
            decoder.run_layers(decoder.embed(packer.batch()), 0, 1, pool)


REFUSED: dict[str, tuple[dict[str, Any], torch.dtype, str]] = {
    "gelu": ({"activation": "gelu"}, torch.float32, "another activation, gelu"),
    "no rotation": ({"ropes": (None,) * BASE["num_layers"]}, torch.float32, "no layer of llama has rotary positions"),
    "float64": ({}, torch.float64, "not torch.float64"),
    "float16": ({}, torch.float16, "not torch.float16"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_they_do_not_support_has_a_reason(name: str):
    changes, dtype, reason = REFUSED[name]
    config = tiny_config(**(BASE | changes))
    why = unsupported(config, dtype, torch.device("cpu"))
    assert why is not None and reason in why
    decoder = Decoder(config, ReferenceAttention(), dtype=dtype, native=True)
    for parameter in decoder.parameters():
        parameter.data.fill_(0.1)
    with pytest.raises(CapabilityError, match="native=True"):
        decoder.finish()


def test_reasons_of_device_and_of_int8():
    assert "not on cuda" in (unsupported(tiny_config(**BASE), torch.float32, torch.device("cuda")) or "")
    assert unsupported(tiny_config(**BASE), torch.float32, torch.device("cpu")) == MISSING
    decoder = Decoder(tiny_config(**BASE), make_backend(torch.float32), dtype=torch.float32, quant="int8", native=True)
    for parameter in decoder.parameters():
        parameter.data.fill_(0.1)
    with pytest.raises(CapabilityError, match="native=True"):
        Stack(decoder)


PROMPT = {"prompt_token_ids": [5, 17, 3, 90, 41, 8]}
LLM_OPTIONS = {"max_model_len": 128, "max_sequences": 2}
ANSWER = SamplingParams(temperature=0, max_tokens=12)


def answer(llm: LLM) -> list[int]:
    return llm.generate([PROMPT], ANSWER)[0].outputs[0].token_ids


def test_networks_they_do_not_support_run_on_torch(tmp_path: Path):
    build("llama2", tmp_path / "relu", seed=4)
    config = json.loads((tmp_path / "relu" / "config.json").read_text())
    (tmp_path / "relu" / "config.json").write_text(json.dumps(config | {"hidden_act": "relu"}))
    auto = LLM(str(tmp_path / "relu"), dtype="float32", **LLM_OPTIONS)
    assert auto._target.decoder.stack is None
    assert answer(auto) == answer(LLM(str(tmp_path / "relu"), dtype="float32", kernels="torch", **LLM_OPTIONS))
    with pytest.raises(CapabilityError, match="llama has another activation, relu"):
        LLM(str(tmp_path / "relu"), kernels="native", **LLM_OPTIONS)
    build("llama2", tmp_path / "llama2", seed=4)
    with pytest.raises(CapabilityError, match="not torch.float64"):
        LLM(str(tmp_path / "llama2"), dtype="float64", kernels="native", **LLM_OPTIONS)
    with pytest.raises(ConfigError, match="no such kernels"):
        LLM(str(tmp_path / "llama2"), kernels="fast", **LLM_OPTIONS)


@needs_kernels
def test_an_llm_uses_them_unless_told_otherwise(tmp_path: Path):
    build("llama2", tmp_path, seed=4)
    made = {k: LLM(str(tmp_path), dtype="float32", kernels=k, **LLM_OPTIONS) for k in ("auto", "native", "torch")}
    assert {k: llm._target.decoder.stack is not None for k, llm in made.items()} == {
        "auto": True,
        "native": True,
        "torch": False,
    }
    assert answer(made["auto"]) == answer(made["native"]) == answer(made["torch"])


PROBE = """
import json, sys, torch
torch.set_num_threads(1)
from paceline import kernels as native
found = {"describe": native.describe(), "why": native.unavailable()}
if len(sys.argv) > 1:
    from paceline import LLM, SamplingParams
    llm = LLM(sys.argv[1], dtype="float32", max_model_len=128, max_sequences=2)
    params = SamplingParams(temperature=0, max_tokens=12)
    answer = llm.generate([{"prompt_token_ids": [5, 17, 3, 90, 41, 8]}], params)
    found |= {"ids": answer[0].outputs[0].token_ids, "stack": llm._target.decoder.stack is not None}
print(json.dumps(found))
"""


def start_probe(model: Path | None = None, **environment: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", PROBE, *([] if model is None else [str(model)])]
    env = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    return subprocess.Popen(command, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def result_of(process: subprocess.Popen[str]) -> dict[str, Any]:
    out, err = process.communicate(timeout=250)
    assert process.returncode == 0, err
    return json.loads(out)


@needs_kernels
def test_without_instructions_of_particular_processors(tmp_path: Path):
    build("llama2", tmp_path, seed=4)
    found = result_of(start_probe(tmp_path, PACELINE_NATIVE="baseline"))
    assert (found["describe"], found["why"], found["stack"]) == ("baseline", None, True)
    assert found["ids"] == answer(LLM(str(tmp_path), dtype="float32", kernels="torch", **LLM_OPTIONS))


def test_a_compiler_that_fails_leaves_torch(tmp_path: Path):
    """The reason is told, and an answer is given all the same."""
    build("llama2", tmp_path / "llama2", seed=4)
    loud = script(tmp_path / "loud", 'echo "kernels.cpp:1: no such thing" >&2; exit 3')
    found = result_of(start_probe(tmp_path / "llama2", XDG_CACHE_HOME=str(tmp_path), CXX=f"{loud} -O1"))
    assert "loud -O1 failed: kernels.cpp:1: no such thing" in found["why"]
    assert found["describe"] == f"torch ({found['why']})" and found["stack"] is False and len(found["ids"]) == 12
    assert not list(tmp_path.glob("paceline/kernels/*"))


@needs_kernels
def test_several_processes_may_build_at_once(tmp_path: Path):
    """Each compiles for itself and puts one whole file in place; what is there is not compiled again."""
    library = kernels.library().path
    slow = script(
        tmp_path / "slow",
        f'for last; do :; done; case "$*" in *--version*) echo 1;; *-shared*) head -c 5000 "{library}" > "$last";'
        f' sleep 0.5; cp "{library}" "$last"; echo x >> "{tmp_path}/links";; *) : > "$last";; esac',
    )
    cache = tmp_path / "cache"
    probes = [start_probe(None, CXX=str(slow), XDG_CACHE_HOME=str(cache)) for _ in range(2)]
    for probe in probes:
        assert result_of(probe)["why"] is None
    (kept,) = (cache / "paceline" / "kernels").iterdir()
    assert kept.suffix == ".so" and kept.read_bytes() == Path(library).read_bytes()
    built = (tmp_path / "links").read_text().count("x")
    assert 1 <= built <= 2
    assert result_of(start_probe(None, CXX=str(slow), XDG_CACHE_HOME=str(cache)))["why"] is None
    assert (tmp_path / "links").read_text().count("x") == built


def script(path: Path, body: str) -> Path:
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return path


@pytest.mark.parametrize(("shape", "k"), [((4, 8192), 3), ((3, 50), 50), ((2, 17), 64), ((1, 8192), 64), ((5, 33), 1)])
@pytest.mark.parametrize("ties", [False, True])
def test_top_is_the_likeliest_tokens_of_each_row(shape: tuple[int, int], k: int, ties: bool) -> None:
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(shape, generator=generator) * 5
    if ties:
        logits = logits.round()
    logits[0, 3] = -torch.inf
    tokens, log_q = top(logits, k)
    order = logits.sort(dim=1, descending=True, stable=True).indices[:, :k]
    assert tokens == order.tolist()  # of equals the first
    torch.testing.assert_close(torch.tensor(log_q), logits.log_softmax(dim=1).gather(1, order))
    wide, wide_q = top(logits.double(), k)  # by torch
    torch.testing.assert_close(torch.tensor(wide_q), torch.tensor(log_q))
    assert all(logits[r, a] == logits[r, b] for r in range(shape[0]) for a, b in zip(tokens[r], wide[r], strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_rows_are_moved_as_torch_moves_them(dtype: torch.dtype):
    assert kernels.library() is not None
    x = torch.randn(300, 129).to(dtype)
    for rows in ([], [7], [3, 3, 299, 0], [*range(0, 300, 2)]):
        assert torch.equal(pick(x, rows), x[torch.tensor(rows, dtype=torch.int64)])
        assert torch.equal(pick(x.t(), rows[:1]), x.t()[rows[:1]]), "not in one piece"
    parts = [x[:1], x[5:5], x[20:270]]
    assert torch.equal(join(parts), torch.cat(parts))
    assert torch.equal(join([part.t() for part in parts[::2]][:1]), x[:1].t())
    assert join(parts[:1]) is parts[0]
    for wrong in ([300], [0, -1]):
        with pytest.raises(IndexError, match="of 300"):
            pick(x, wrong)
