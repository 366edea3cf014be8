"""Weights in 4 and 8 bits: what is drafted changes no token, whatever drafts."""

from __future__ import annotations

from pathlib import Path

import pytest
from kits.gguf_files import as_folder, write
from kits.native import needs_kernels

from paceline import LLM, SamplingParams
from paceline.core.outputs import RequestOutput
from paceline.weights.gguf import read_gguf
from paceline.weights.gguf_tokenizer import load_gguf_tokenizer


@needs_kernels
@pytest.mark.parametrize("target", ["file", "folder"])
def test_a_file_and_a_folder_draft_for_each_other(target: str, tmp_path: Path) -> None:
    """The same weights in blocks and as plain numbers: most drafts are right, and none changes a token."""
    file = write(tmp_path / "m.gguf", "q8_0")
    places = {"file": file, "folder": as_folder(file, tmp_path / "folder")}
    load_gguf_tokenizer(read_gguf(file)).save_pretrained(places["folder"])
    drafter = places["folder" if target == "file" else "file"]
    prompts = [{"prompt_token_ids": ids} for ids in ([5, 17, 200, 33], [319, 8, 8])]
    params = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)

    def outputs(drafter: str, budget: int | None) -> list[RequestOutput]:
        return LLM(str(places[target]), drafter=drafter, budget=budget).generate(prompts, params)

    drafted = outputs(f"draft_model:{drafter},depth=4", 4)
    assert [o.outputs[0].token_ids for o in drafted] == [o.outputs[0].token_ids for o in outputs("none", None)]
    assert min(o.outputs[0].origins.count("drafted") for o in drafted) > 20
