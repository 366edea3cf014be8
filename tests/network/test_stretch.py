"""tools/stretch.py: checkpoints with more layers, the tokens of the original, and drafters of the original that fit."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import pytest
from kits.gguf_files import NUMBERS, write
from kits.native import needs_kernels

from paceline import LLM, CapabilityError, ConfigError, SamplingParams
from paceline.weights.files import FINGERPRINT, fingerprint
from paceline.weights.source import read_config, resolve_folder

write_stretched = runpy.run_path(str(Path(__file__).parents[2] / "tools" / "stretch.py"))["write_stretched"]
PROMPTS = ["Once upon a time", "def add(a, b):"]
GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
Answer = tuple[list[int], int, int, int]
SAMPLED = SamplingParams(temperature=0.9, top_k=20, seed=5, max_tokens=16, ignore_eos=True)


@pytest.fixture(scope="module")
def twice(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(write_stretched("paceline-small", tmp_path_factory.mktemp("stretched") / "twice", 2))


def answers(model: Path | str, drafter: str, round_: str = "auto", prompts: Any = PROMPTS) -> list[Answer]:
    """Ids, passes, drafted and accepted tokens of every prompt, greedy and sampled."""
    llm = LLM(str(model), drafter=drafter, round=round_, budget=4, max_model_len=256, max_sequences=2, threads=1)
    outputs = [o for params in (GREEDY, SAMPLED) for o in llm.generate(prompts, params)]
    assert llm.engine.round.failure is None
    return [(o.outputs[0].token_ids, o.stats.passes, o.stats.drafted, o.stats.accepted) for o in outputs]


@needs_kernels
def test_drafters_of_the_original_draft_the_same(twice: Path, tmp_path: Path) -> None:
    own = read_config(resolve_folder("paceline-small"))
    assert read_config(twice).num_layers == 2 * own.num_layers == 24
    streams = write_stretched("paceline-small-streams", tmp_path / "streams", 2)
    for drafter, there in {
        "eagle:paceline-small-eagle": "eagle:paceline-small-eagle",
        "streams:paceline-small-streams": f"streams:{streams}",
    }.items():
        found = answers("paceline-small", drafter)
        assert answers(twice, there) == found
        assert sum(accepted for *_, accepted in found) > 10


def test_what_was_trained_for_layers_by_number_is_refused(twice: Path) -> None:
    with pytest.raises(CapabilityError, match="has num_layers=12, .* has 24"):
        LLM(str(twice), drafter="streams:paceline-small-streams")


def test_the_fingerprint_is_what_lets_drafters_fit(twice: Path, tmp_path: Path) -> None:
    assert fingerprint(twice) == fingerprint(resolve_folder("paceline-small"))
    for file in twice.iterdir():
        (tmp_path / file.name).symlink_to(file)
    config = json.loads((twice / "config.json").read_text())
    del config[FINGERPRINT]
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CapabilityError, match="whose weights differ"):
        LLM(str(tmp_path), drafter="eagle:paceline-small-eagle")


@needs_kernels
def test_a_gguf_file_says_the_same(tmp_path: Path) -> None:
    file = write(tmp_path / "m.gguf", {"attn_v": "q6_k"})
    out = write_stretched(file, tmp_path / "out.gguf", 3)
    assert read_config(out).num_layers == 3 * read_config(file).num_layers
    assert fingerprint(out) == fingerprint(file)
    prompts = [{"prompt_token_ids": [3, 4, 5] * 9}, {"prompt_token_ids": [*range(9, 40)]}]
    found = [answers(model, "ngram", prompts=prompts) for model in (file, out)]
    assert found[0] == found[1] and sum(drafted for _, _, drafted, _ in found[0]) > 0


def test_layers_that_differ_by_a_rule_are_refused(tmp_path: Path) -> None:
    shape = {key.removeprefix("llama."): value for key, value in NUMBERS.items() if key.startswith("llama.")}
    shape |= {"block_count": 7, "attention.layer_norm_rms_epsilon": 1e-6, "attention.sliding_window": 128}
    changed = {"general.architecture": "gemma3"} | {f"gemma3.{key}": value for key, value in shape.items()}
    file = write(tmp_path / "m.gguf", changed=changed)
    with pytest.raises(CapabilityError, match="does not say layer by layer"):
        write_stretched(file, tmp_path / "out.gguf", 2)
    with pytest.raises(ConfigError, match="is not a number of layers"):
        write_stretched(file, tmp_path / "out.gguf", 0)
