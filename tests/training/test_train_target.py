"""zoo/recipes/train_target.py: a tokenizer and a model from data, loaded and read as users load them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import train_target

from paceline import LLM, SamplingParams
from paceline.core.errors import ConfigError
from paceline.weights.source import load_tokenizer

RECIPE = """recipe = "target"
options = {layers = 1, d_model = 32, d_ff = 48, heads = 2, kv_heads = 2, vocab_size = 300, context = 128}
train = {steps = 8, warmup = 2, precision = "fp32", learning_rate = 0.02, evaluate_every = 4}
phase = [{rows = 4, length = 64}]
data = {source = [{file = "boxes.jsonl"}], held_out = [{file = "boxes.jsonl"}]}
"""


def test_a_model_is_trained_with_a_tokenizer_of_its_own(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped and gone on with; the result loads, reads and answers in the chat form."""
    monkeypatch.setitem(train_target.KINDS, "target", None)  # what the script enters is taken out again
    entry = {"sha256": None, "source": "made here", "obtain": "as it is"}
    (tmp_path / "manifest.json").write_text(json.dumps({"files": {data.name: entry}}), encoding="utf-8")
    out, recipe = tmp_path / "out", tmp_path / "r.toml"
    arguments = [str(recipe), "--data", str(data.parent), "--out", str(out)]
    recipe.write_text(RECIPE.replace("= 300", "= 100"), encoding="utf-8")
    with pytest.raises(ConfigError, match="no room for the bytes"):
        train_target.main(arguments)
    recipe.write_text(RECIPE, encoding="utf-8")
    train_target.main([*arguments, "--stop-after", "3"])
    assert not (out / "result").exists()
    train_target.main(arguments)
    result = out / "result"
    llm = LLM(str(result), dtype="float32")
    assert llm.generate("What colour", SamplingParams(max_tokens=4))[0].outputs[0].token_ids
    tokenizer = load_tokenizer(result)
    chat = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]
    assert tokenizer.apply_chat_template(chat, tokenize=False) == "<|bos|><|user|>Hi<|assistant|>Ho<|eos|>"
    facts = json.loads((result / "training.json").read_text("utf-8"))
    assert (facts["recipe"], facts["steps"], facts["options"]["layers"]) == ("target", 8, 1)
    lines = [json.loads(line) for line in (out / "log.jsonl").read_text("utf-8").splitlines()]
    assert [line["step"] for line in lines if "loss/boxes" in line] == [4, 8]
    assert lines[-1]["loss/boxes"] < lines[0]["loss"]
