"""The study of Lyanna measures acceptance in the engine, here of a drafter that is not trained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import lyanna  # noqa: F401  (all its figures are known from then on)
import pytest
import torch
import transformers  # noqa: F401  (first loaded in a run, its log would go to a stream that is closed afterwards)
from kits.stream_sets import MODEL
from kits.studies import run
from lyanna_parts.acceptance import FIRST_TAKEN, INFO_TAKEN, TRAINED
from lyanna_parts.common import study

from paceline.draft.fit import tokenizer_mark
from paceline.draft.states.head import layer_json
from paceline.papers.lyanna.model import LyannaModel, LyannaShape
from paceline.weights.files import fingerprint
from paceline.weights.source import load_tokenizer, read_config, resolve_folder

pytestmark = pytest.mark.timeout(300)
SMALL = ("--model", MODEL, "--prompts", 2, "--repeats", 1, "--max-new-tokens", 6, "--threads", 1, "--tasks", "sql")


def test_table_1_comes_from_the_engine(tmp_path: Path) -> None:
    place = resolve_folder(MODEL)
    facts: dict[str, Any] = {"target": MODEL, "fingerprint": fingerprint(place), "rank": 4}
    mark = tokenizer_mark(load_tokenizer(place))
    shape = LyannaShape(layer=layer_json(read_config(place)), tokenizer=mark, **facts)
    LyannaModel.fresh(shape, torch.Generator().manual_seed(0)).save(tmp_path / "untrained")
    made = run(study, tmp_path, "table_1_shipped", "--lyanna", tmp_path / "untrained", *SMALL)
    assert {*made["acceptance"]["sql"]} == {TRAINED, INFO_TAKEN, FIRST_TAKEN} and made["prompts"] == {"sql": 2}
    raw = json.loads((tmp_path / "table_1_shipped" / "report.json").read_text("utf-8"))
    assert {m["drafter"].partition(":")[0] for m in raw["methods"]} == {"none", "lyanna"}
    assert all("nodes=16" in m["drafter"] and m["settings"] == {"budget": 16} for m in raw["methods"][1:])
    assert sum(t["drafted"] for t in raw["trials"]) > 16  # whole trees were verified
