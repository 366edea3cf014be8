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
    """Copy the drafter to its place, and write card and settings; the last of them makes it usable.

    Args:
        folder: of the run.
        mark: fingerprint of the model.
        trained: what training gave.
        verdict: what it is worth.
    """
    weights, name = folder / adapted.WEIGHTS, Path(config.model).name
    with writing(f"--out {folder}", FULL):
        fresh = folder / f"{adapted.WEIGHTS}.part"
        shutil.rmtree(fresh, ignore_errors=True)
        shutil.copytree(folder / trained["result"], fresh)
        headers = stored_tensors(sorted(fresh.glob("*.safetensors")), "train it again")
        card: dict[str, Any] = {"role": "head", "description": f"drafts for {name}, made by paceline adapt"}
        card |= {"parameters": sum(one.numel for one in headers), "target": name, "read_by": KIND}
        (fresh / CARD).write_text(json.dumps(card, indent=2) + "\n", encoding="utf-8")
        shutil.rmtree(weights, ignore_errors=True)
        fresh.replace(weights)
        drafter = {PLAIN: "none"}.get(verdict.chosen) or drafters(config, adapted.HERE)[verdict.chosen]
        settings = {"drafter": drafter, "target": name, "fingerprint": mark, "dtype": config.dtype}
        adapted.write(folder, {**settings, "kind": KIND, "verdict": verdict.words})
    adapted.remember(folder, mark)
