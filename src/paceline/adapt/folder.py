"""What a run leaves for use: the drafter with its card, and the settings by which `--drafter FOLDER` drafts."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..bench.records import PLAIN
from ..draft import adapted
from ..train.files import writing
from ..weights.files import stored_tensors
from ..weights.zoo import CARD
from .config import KIND, AdaptConfig
from .verdict import Verdict, drafters
from .work import FULL

REPORT = "report"  # folder of the bench's report


def leave(
    config: AdaptConfig,
    folder: Path,
    mark: str,
    trained: Mapping[str, Any],
    verdict: Verdict,
) -> None:
    """Copy the drafter to its place, and write card, page and settings; the last of them makes it usable.

    Args:
        folder: of the run.
        mark: fingerprint of the model.
        trained: what training gave.
        verdict: what it is worth.
    """
    weights = folder / adapted.WEIGHTS
    name = Path(config.model).name
    with writing(f"--out {folder}", FULL):
        fresh = folder / f"{adapted.WEIGHTS}.part"
        shutil.rmtree(fresh, ignore_errors=True)
        shutil.copytree(folder / trained["result"], fresh)
        headers = stored_tensors(sorted(fresh.glob("*.safetensors")), "train it again")
        card: dict[str, Any] = {"role": "head", "description": f"drafts for {name}, made by paceline adapt"}
        card |= {"parameters": sum(one.numel for one in headers), "target": name, "read_by": KIND}
        (fresh / CARD).write_text(json.dumps(card, indent=2) + "\n", encoding="utf-8")
        origin = "Made by `paceline adapt`; `training.json` has its data with hashes, settings and losses."
        text = f"# A drafter for {name}\n\n{origin}\n\n{page(trained, verdict)}"
        (fresh / "README.md").write_text(text, encoding="utf-8")
        shutil.rmtree(weights, ignore_errors=True)
        fresh.replace(weights)
        drafter = {PLAIN: "none"}.get(verdict.chosen) or drafters(config, adapted.HERE)[verdict.chosen]
        settings = {"drafter": drafter, "target": name, "fingerprint": mark, "dtype": config.dtype}
        adapted.write(folder, {**settings, "kind": KIND, "verdict": verdict.words})
    adapted.remember(folder, mark)


def page(trained: Mapping[str, Any], verdict: Verdict) -> str:
    """Return the card for a reader: verdict, data, tokens, checks, figures."""
    checks = "\n".join(f"| {tokens:,.0f} | {value:.2f} |" for tokens, value in trained["checks"])
    figures = "\n".join(
        f"| {method} | {value:.2f} [{low:.2f}, {high:.2f}] | {verdict.tokens_per_pass.get(method, 1.0):.2f} | "
        + ", ".join(f"{kind} {ratio:.2f}" for kind, ratio in verdict.by_kind.get(method, {}).items())
        + " |"
        for method, (value, low, high) in verdict.times_plain.items()
    )
    measured = f"""On prompts that were put aside, over plain decoding, 95% intervals; ids equal in {verdict.equal} of
{verdict.sequences} sequences:

| method | over plain | tokens a pass | by kind of prompt |
|:--|--:|--:|:--|
{figures}
"""
    return f"""**{verdict.words[:1].upper()}{verdict.words[1:]}.**

Trained on {trained["tokens"]:,} tokens in {trained["steps"]:,} steps, on the model's own answers to
given prompts and to prompts that it drew itself. Held-out prompts:

| tokens learned from | accepted of a draft |
|--:|--:|
{checks}

{measured if figures else ""}"""
