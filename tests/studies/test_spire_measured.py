"""The measured parts of the study of SPIRe, in small: with a draft that was cut out of the target and not trained."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import spire
from kits.studies import run
from spire_parts.judged import NOISE, taus_of

from paceline.papers.spire.recipe import SpireOptions, build
from paceline.train.network import Network
from paceline.train.registry import BuildContext
from paceline.weights import zoo

pytest.importorskip("matplotlib")
TEXT = [{"prompt": f"Say {n}.", "completion": "one two three four five six seven " * 4} for n in range(3)]


@pytest.fixture(scope="module")
def drafts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A draft as it starts, and text."""
    folder, target = tmp_path_factory.mktemp("drafts"), zoo.find("paceline-small")
    assert target is not None
    network = Network.load(target, frozen=True)
    made = {}
    made["spire"] = folder / "spire"
    build(SpireOptions(), BuildContext(target=network, target_folder=target, tokenizer=None)).export(made["spire"])
    made["text"] = folder / "drawn.jsonl"
    made["text"].write_text("\n".join(map(json.dumps, TEXT)) + "\n", encoding="utf-8")
    return made


def test_tau_from_the_engine(tmp_path: Path, drafts: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spire_parts.accepted.CONTEXTS", (72,))
    given = ("--vanilla", "paceline-small-draft", "--spire", drafts["spire"], "--prompts", 1, "--max-new-tokens", 6)
    found = run(spire.study, tmp_path, "table_1", *given, "--quick")
    rows = found["tau"]["the target's domains"]
    assert {(row["context"], row["draft"]) for row in rows} == {(72, d) for d in ("vanilla", "MagicDec", "SPIRe")}
    kinds = ("T=1", NOISE, "greedy")
    assert all(1 <= low <= tau <= high <= 5 for row in rows for tau, low, high in (row[kind] for kind in kinds))
    taus = taus_of(str(tmp_path / "table_1.json"))
    assert taus == {(row["draft"], row["context"]): row[NOISE][0] for row in rows} and len(taus) == 3
    assert any("MagicDec" in row["draft"] and row["greedy"][0] > 2 for row in rows)
