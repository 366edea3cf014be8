"""The trainable decoder says what transformers and the engine say of the same weights."""

from __future__ import annotations

import dataclasses
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from kits.tiny import VOCAB
from toolkit import SHAPE, examples, network
from train_target import TargetRecipe, grow

from paceline import LLM, SamplingParams
from paceline.train.data import Example, TokenBatch, collate
from paceline.train.network import Network

sys.path.insert(0, str(Path(__file__).parents[1] / "parity"))
from checkpoints import VOCAB as WIDE  # noqa: E402  (the builders live beside the parity tests)
from checkpoints import build  # noqa: E402


def row(count: int, seed: int = 0, vocab: int = VOCAB) -> Example:
    return Example(np.random.default_rng(seed).integers(8, vocab, count).astype(np.int32))


@pytest.mark.parametrize("family", ["llama3", "qwen3", "llama-biased", "mistral", "gemma3", "smollm3"])
def test_logits_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    """Two documents in a row, longer than windows and original contexts: each as if it were alone."""
    model = build(family, tmp_path)
    documents = [row(90, 1, WIDE), row(60, 2, WIDE)]
    batch = collate([documents], 160)
    with torch.no_grad():
        ours = Network.load(tmp_path, frozen=True)
        found = ours.logits(ours(batch))[0]
        start = 0
        for document in documents:
            stop = start + len(document.tokens)
            wanted = model(torch.from_numpy(document.tokens).long()[None]).logits[0]
            torch.testing.assert_close(found[start:stop], wanted, rtol=2e-4, atol=2e-4)
            assert float(wanted.std()) > 0.1
            start = stop


def test_gradients_are_those_of_transformers(tmp_path: Path) -> None:
    model = build("qwen3", tmp_path)
    batch = collate([[row(40, 3, WIDE)]], 40)
    ours = Network.load(tmp_path)
    torch.nn.functional.cross_entropy(ours.logits(ours(batch))[0, :-1], batch.tokens[0, 1:]).backward()
    model(batch.tokens, labels=batch.tokens).loss.backward()
    theirs = model.model.layers[1].mlp.down_proj.weight.grad
    torch.testing.assert_close(ours.layers[1].down.weight.grad, theirs, rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(ours.decoder.embedding.grad, model.model.embed_tokens.weight.grad, rtol=1e-3, atol=1e-5)


def hugging_face(layers: int = 3) -> dict[str, Any]:
    """The tiny configuration as a config.json, without its window."""
    shape = dataclasses.replace(SHAPE, layers=layers)
    return shape.config(VOCAB, 512, 1, 2, 0, tied=False)


def test_growing_keeps_the_function(tmp_path: Path) -> None:
    small = network(windows=(None,) * 3)
    small.save(tmp_path, hugging_face(), torch.float32)
    deep = network(seed=7, num_layers=5, windows=(None,) * 5)
    batch: TokenBatch = collate([examples(3)], 120)
    grow(deep, tmp_path, (0, 1, 1, 2, 2))
    same = Network.load(tmp_path)
    torch.testing.assert_close(deep(batch), same(batch), rtol=1e-5, atol=1e-6)


def test_what_is_exported_answers_as_what_was_trained(target: Path, tmp_path: Path) -> None:
    """Export rounds to bf16: the engine, in float32, says the likeliest tokens of the rounded network."""
    trained = Network.load(target)
    trained.decoder.embedding.data.add_(0.01)
    TargetRecipe(trained, json.loads((target / "config.json").read_text("utf-8"))).export(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copyfile(target / name, tmp_path / name)
    with torch.no_grad():
        for value in trained.parameters():
            value.copy_(value.bfloat16().float())
    llm = LLM(str(tmp_path), dtype="float32")
    prompt = [5, 70, 81, 90, 100, 12]
    params = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
    said = list(llm.generate([{"prompt_token_ids": prompt}], params)[0].outputs[0].token_ids)
    ids = np.array([*prompt, *said], dtype=np.int32)
    logits = trained.logits(trained(collate([[Example(ids)]], len(ids))))[0]
    assert logits.argmax(-1)[len(prompt) - 1 : -1].tolist() == said
    assert len(set(said)) > 5
