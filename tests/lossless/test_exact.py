"""Exact layers: the bits of a row's logits depend on its own text alone, so ids do too.

First the bits: one row a pass against every width from 1 to 64, other sequences in the batch, trees, scattered
blocks. Then ids, end to end: batches, chunks, prefix hits, preemption and drafters. Without ``exact`` rows do
differ; how many is printed (``pytest -s``), since it depends on the machine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from itertools import pairwise, product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kits.native import Text, forward
from kits.tiny import assemble, draft_model, run, tiny_config, tiny_decoder
from torch import Tensor

from paceline import LLM
from paceline.core.outputs import RequestOutput
from paceline.core.sampling import SamplingParams
from paceline.draft.draft_model import DraftModel, DraftModelConfig
from paceline.draft.ngram import NgramConfig
from paceline.kv.pool import KVPool
from paceline.model import linear
from paceline.model.attention import make_backend
from paceline.model.decoder import Decoder
from paceline.model.packing import RowPacker
from paceline.model.rope import RopeConfig
from paceline.weights import zoo
from paceline.weights.loader import load_model
from paceline.weights.source import resolve

DTYPES = ("bfloat16", "float16", "float32", "int8")
MODELS = ("paceline-small", "tiny", "gemma")
SLOW = {("paceline-small", dtype) for dtype in ("float16", "float32", "int8")}
WIDTHS = 64
# Of the embedded model: kernels change with the number of rows where that is small, and at multiples of 8 and 16.
SOME_WIDTHS = (*range(1, 10), 15, 16, 17, 31, 32, 33, 48, 64)
PREFIX = 101  # tokens before the rows under test, which then cross a bucket of keys
TINY = {  # grouped queries, a sliding window, untied head; wide enough for kernels to differ
    "vocab_size": 512,
    "d_model": 64,
    "d_ff": 160,
    "num_layers": 4,
    "num_heads": 8,
    "num_kv_heads": 2,
    "head_dim": 16,
    "windows": (None, 24, None, 40),
    "eos_ids": (),
}
GEMMA = TINY | {  # norms behind both halves, a rotation of its own in layers that slide
    **{"qk_norm": True, "post_norms": True, "wide_norms": True, "activation": "gelu_tanh"},
    **{"query_scalar": 24.0, "embedding_scale": 8.0, "rope": RopeConfig(dim=16, theta=1000.0)},
    "ropes": tuple(RopeConfig(dim=16, theta=theta) for theta in (1000.0, 50.0, 1000.0, 50.0)),
}
SHAPES = {"tiny": TINY, "gemma": GEMMA}
KINDS = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32, "int8": torch.bfloat16}
# The embedded model in its own dtype with every run of the tests, in the others with the full grids.
EVERY_MODEL = pytest.mark.parametrize(
    ("name", "dtype"),
    [
        pytest.param(name, dtype, marks=pytest.mark.full if (name, dtype) in SLOW else ())
        for name in MODELS
        for dtype in DTYPES
    ],
)


@cache
def model(name: str, dtype: str, exact: bool = True) -> Decoder:
    """One of `MODELS`, with the SDPA backend, made once."""
    if name in SHAPES:
        quant = "int8" if dtype == "int8" else None
        shape = tiny_config(**SHAPES[name])
        return tiny_decoder(shape, dtype=KINDS[dtype], exact=exact, quant=quant)
    folder = zoo.find(name)
    assert folder is not None
    return load_model(resolve(folder, dtype), attention=make_backend(KINDS[dtype], exact=exact), exact=exact)


def random_tokens(count: int, vocab_size: int, seed: int) -> list[int]:
    """``count`` ids, none of them among the special ones."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(8, vocab_size, (count,), generator=generator).tolist()


def _in_passes_of(text: Text, width: int) -> Tensor:
    """[WIDTHS, V]: the rows behind the prefix, at most ``width`` a pass."""
    text.rewind(PREFIX)
    parts = [text.advance(min(width, WIDTHS - done)) for done in range(0, WIDTHS, width)]
    return torch.cat(parts)


@cache
def _one_by_one(name: str, dtype: str, exact: bool = True) -> tuple[Text, Tensor]:
    decoder = model(name, dtype, exact)
    pool = KVPool(*decoder.cache_shape, 1024, decoder.dtype, decoder.device)
    text = Text(decoder, random_tokens(PREFIX + WIDTHS, decoder.config.vocab_size, seed=1), pool=pool)
    for _ in range(PREFIX):
        text.advance(1)
    return text, _in_passes_of(text, 1)


def _differing(a: Tensor, b: Tensor) -> int:
    """Rows with any differing bit."""
    return int((a != b).any(dim=1).sum())


@EVERY_MODEL
def test_widths_1_to_64(name: str, dtype: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A pass over any number of rows gives each row the bits of a pass of its own."""
    text, alone = _one_by_one(name, dtype)
    for width in SOME_WIDTHS if name == "paceline-small" else range(1, WIDTHS + 1):
        text.rewind(PREFIX)
        assert torch.equal(text.advance(width), alone[:width]), f"one pass of {width} rows"
    for width in (2, 5, 8, 13, 31):  # the rows of a later pass attend to what the earlier ones left
        assert torch.equal(_in_passes_of(text, width), alone), f"passes of {width} rows"
    loose, plain = _one_by_one(name, dtype, exact=False)
    differing = [_differing(_in_passes_of(loose, width), plain) for width in (2, 5, 8, 64)]
    with capsys.disabled():
        print(f"\n{name} {dtype}: without exact {differing} of {WIDTHS} rows differ at widths 2, 5, 8, 64", end=" ")


@EVERY_MODEL
def test_prefill_in_one_pass(name: str, dtype: str) -> None:
    """A prompt computed at once, or in chunks of 7 or 64, leaves the K/V that a row a pass leaves."""
    text, alone = _one_by_one(name, dtype)
    for chunk in (7, 64, PREFIX):
        text.rewind(0)
        for done in range(0, PREFIX, chunk):
            text.advance(min(chunk, PREFIX - done))
        assert torch.equal(_in_passes_of(text, 8), alone), f"chunks of {chunk}"


@EVERY_MODEL
def test_company_and_scattered_blocks(name: str, dtype: str) -> None:
    """Other sequences in the pass change nothing, nor do blocks that lie apart."""
    decoder = model(name, dtype)
    text, alone = _one_by_one(name, dtype)
    shape = decoder.config
    room = 3 * (PREFIX + WIDTHS) + 48  # so little that the sequences must take what is left anywhere
    pool = KVPool(*decoder.cache_shape, room, decoder.dtype, decoder.device)
    others = [random_tokens(PREFIX + WIDTHS, shape.vocab_size, seed=s) for s in (2, 3)]
    texts = [Text(decoder, tokens, pool=pool) for tokens in (others[0], text.tokens, others[1])]
    rows = []
    scattered = False
    for done in range(0, PREFIX + WIDTHS, 5):  # growing in turns, the sequences take each other's next blocks
        width = min(5, PREFIX + WIDTHS - done)
        packer = RowPacker(decoder, decoder.device)
        for each in texts:
            each.pack(packer, width)
        rows.append(forward(decoder, packer, pool)[width : 2 * width])
        pool.commit([(each.cache, range(width)) for each in texts])
        scattered |= any(b != a + 1 for each in texts for a, b in pairwise(each.cache.blocks))
    assert scattered, "no block was out of line: the test tested nothing"
    assert torch.equal(torch.cat(rows)[PREFIX:], alone)


@EVERY_MODEL
def test_branches_of_a_tree(name: str, dtype: str) -> None:
    """A path through a tree has the bits of the same text in plain decoding, whatever grows beside it."""
    text, alone = _one_by_one(name, dtype)
    decoder = text.decoder
    text.rewind(PREFIX)
    depth = 20
    right = text.tokens[PREFIX : PREFIX + depth]
    wrong = [(t + 9) % decoder.config.vocab_size for t in right]
    tokens = [t for pair in zip(wrong, right, strict=True) for t in pair]  # node 2d + 1 is the path's at depth d
    nodes = 2 * depth
    visible = torch.zeros(nodes, nodes, dtype=torch.bool)
    for node in range(nodes):
        visible[node, 1 : 2 * (node // 2) : 2] = True  # the path above
        visible[node, node] = True
    places = [PREFIX + node // 2 for node in range(nodes)]
    text.cache.reserve(nodes)
    packer = RowPacker(decoder, decoder.device)
    stop = PREFIX + nodes
    slots, keys = text.cache.slots(PREFIX, stop), text.cache.slots(0, stop)
    packer.add(tokens, places, slots, keys, stop, PREFIX, visible, places)
    logits = forward(decoder, packer, text.pool)
    assert torch.equal(logits[1::2], alone[:depth])
    assert _differing(logits[::2], alone[:depth]) == depth  # the other branch is another text
    text.pool.commit([(text.cache, range(1, nodes, 2))])  # and what is kept of it serves the rows that follow
    assert torch.equal(text.advance(WIDTHS - depth), alone[depth:])


TEXTS = (
    "CREATE TABLE players (name, team, number)\nQuestion: Which team does number 21 play for?\nSQL:",
    "Write a sentence for the meaning representation.\nname[The Vaults], eatType[pub], area[riverside]\nText:",
    "Once upon a time there was a small house near the river, and in the small house near the river",
    "def add(a, b):\n    return a + b\n\ndef sub(a, b):\n    return",
    "The",
)


@cache
def prompts(name: str) -> list[list[int]]:
    """Five prompts of different lengths; for random models also repetitive ones."""
    if name in SHAPES:
        once = [random_tokens(n, TINY["vocab_size"], seed=n) for n in (1, 20, 37, 70)]  # type: ignore[call-overload]
        return [*once, once[1] * 4]
    from paceline.weights.source import load_tokenizer

    folder = zoo.find(name)
    assert folder is not None
    tokenizer: Any = load_tokenizer(folder)
    return [list(tokenizer.encode(text)) for text in TEXTS]


def _draft(name: str, dtype: str, **options: Any) -> DraftModel:
    if name in SHAPES:
        return draft_model(target={"config": tiny_config(**SHAPES[name]), "dtype": KINDS[dtype]}, **options)
    loaded = SimpleNamespace(
        decoder=model("paceline-small-draft", dtype, exact=False), tokenizer=None, name="draft", folder=None
    )
    return DraftModel(DraftModelConfig(model="draft", **options), loaded)


SETTINGS: dict[str, tuple[Callable[[str, str], Any], dict[str, Any]]] = {
    "one row a pass": (lambda *_: None, {"max_batch_rows": 1, "max_sequences": 1}),
    "together": (lambda *_: None, {}),
    "7 rows": (lambda *_: None, {"max_batch_rows": 7}),
    "64 rows": (lambda *_: None, {"max_batch_rows": 64}),
    "tight pool": (lambda *_: None, {"kv_tokens": 176, "max_model_len": 150, "block_size": 4}),
    "ngram": (lambda *_: NgramConfig(depth=6), {}),
    "ngram in a tight pool": (lambda *_: NgramConfig(), {"kv_tokens": 176, "max_model_len": 150}),
    "chain": (lambda *a: _draft(*a, depth=5), {}),
    "chain in small chunks": (lambda *a: _draft(*a, depth=3), {"max_batch_rows": 23}),
    "static tree": (lambda *a: _draft(*a, branching="3x2x1"), {}),
    "dynamic tree": (lambda *a: _draft(*a, topk=4, depth=4), {}),
    "dynamic tree in a tight pool": (
        lambda *a: _draft(*a, topk=3, depth=4),
        {"kv_tokens": 176, "max_model_len": 150, "block_size": 4},
    ),
}


def _answers(name: str, dtype: str, setting: str, params: Sequence[SamplingParams]) -> list[list[RequestOutput]]:
    """Two rounds of every prompt with every params; the second finds the first one's K/V."""
    make, options = SETTINGS[setting]
    engine = assemble(make(name, dtype), decoder=model(name, dtype), texts=None, **options)
    requests = [(prompt, p) for prompt in prompts(name) for p in params]
    return [run(engine, requests), run(engine, requests)]


@cache
def _reference(name: str, dtype: str) -> list[list[int]]:
    """Ids of every request alone in a fresh engine."""
    alone = []
    for prompt in prompts(name):
        for params in PARAMS:
            output = run(assemble(decoder=model(name, dtype), texts=None), [(prompt, params)])
            alone.append(output[0].outputs[0].token_ids)
    return alone


PARAMS = (
    SamplingParams(temperature=0, max_tokens=16, ignore_eos=True),
    SamplingParams(temperature=0.8, top_p=0.95, max_tokens=16, ignore_eos=True, seed=5),
)


# With every run of the tests: the others differ from one of these in a size; the random model in bf16 meets them all.
SHORT = {"one row a pass", "tight pool", "dynamic tree"}


@pytest.mark.parametrize(
    ("name", "dtype", "setting"),
    [
        pytest.param(name, dtype, setting, marks=pytest.mark.full if long else ())
        for name, dtype, setting in product(MODELS, DTYPES, SETTINGS)
        for long in [(name, dtype) in SLOW or ((name, dtype) != ("tiny", "bfloat16") and setting not in SHORT)]
    ],
)
def test_ids(name: str, dtype: str, setting: str) -> None:
    """Batches, chunks, prefix hits, preemption and drafters change no token."""
    expected = _reference(name, dtype)
    rounds = _answers(name, dtype, setting, PARAMS)
    for outputs in rounds:
        assert [o.outputs[0].token_ids for o in outputs] == expected
    stats = [o.stats for outputs in rounds for o in outputs]
    assert any(s.cached_prompt_tokens for s in stats)
    if "tight" in setting:
        assert any(s.preemptions for s in stats)
    if SETTINGS[setting][0](name, dtype) is not None:
        assert any(s.drafted for s in stats) and not any(s.off_reason for s in stats if s.drafted)
        if name not in SHAPES or "ngram" not in setting:  # random text seldom repeats itself
            assert any(s.accepted for s in stats)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_by_default_no_draft_changes_an_answer_of_torch_s_kernels(
    dtype: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """On a processor whose product of one row is another kernel's, whatever this one does."""
    monkeypatch.setattr(linear, "can_pack", lambda: False)
    monkeypatch.setattr(linear, "_BLOCKS", {})
    monkeypatch.setattr(linear.PlainLinear, "__call__", _one_row_otherwise)
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    given: Any = {"dtype": dtype, "kernels": "torch", "max_model_len": 128, "threads": 1}
    equal = {}
    for exact in (None, False):
        plain = LLM("paceline-small", exact=exact, **given)
        drafted = LLM("paceline-small", exact=exact, share=plain, drafter="ngram", budget=3, **given)
        alone = [plain.generate(text, params)[0] for text in TEXTS[1:3]]
        others = [*(drafted.generate(text, params)[0] for text in TEXTS[1:3]), *plain.generate(TEXTS[1:3], params)]
        equal[exact] = [o.outputs[0].token_ids for o in others] == [o.outputs[0].token_ids for o in alone] * 2
        assert sum(o.stats.passes for o in others[:2]) < sum(o.stats.passes for o in alone)
    assert equal == {None: True, False: False}
    [said] = caplog.messages
    assert said.startswith("torch's kernels give a row other bits") and "5 of 5 products compute rows by" in said


def _one_row_otherwise(self: linear.PlainLinear, x: Tensor) -> Tensor:
    y = torch.nn.functional.linear(x, self.weight, self.bias)
    return y if len(x) > 1 else y + y.roll(1, -1) / 8
