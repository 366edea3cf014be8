"""The drafter of an `LLM`, built again from what its worker is told, is the same drafter."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from paceline.api.assembly.drafting import build_drafter
from paceline.api.assembly.engine import load_target
from paceline.api.config import LLMConfig
from paceline.core.errors import CapabilityError, ConfigError
from paceline.core.sampling import SamplingParams
from paceline.draft.sessions import ROOT, Expand, Opening
from paceline.runtime.draft_worker import draft_worker, service
from paceline.runtime.placement import Placement

DRAFTER = "draft_model:paceline-small-draft,depth=3"


def test_it_drafts_what_the_drafter_here_drafts():
    config = LLMConfig(model="paceline-small-draft", drafter=DRAFTER, max_sequences=2)
    spec = draft_worker(config, config.resolve(), 40, 512, Placement())
    made = service("cpu", **json.loads(json.dumps(spec.options)))
    assert made.facts == spec.expected and made.facts.weights.endswith(" (2 layers)")
    target = load_target(config, config.resolve())
    drafter: Any = build_drafter(config, target, 0)
    drafter.bind(target.decoder.info(target.name, target.tokenizer), 2, 512, torch.device("cpu"))
    sessions = [drafter.sessions(40), made.sessions]
    tokens = target.tokenizer.encode("SELECT name FROM players WHERE")
    for one in sessions:
        one.open(Opening(0, tokens, len(tokens), SamplingParams(temperature=0), 0, 0))
    here, there = (one.grow([Expand(0, [(ROOT, 100)], [ROOT], 3)])[0] for one in sessions)
    assert here == there and len(here.tokens) == 6


def test_what_cannot_be():
    config = LLMConfig(model="paceline-small")
    with pytest.raises(ConfigError, match="no drafter is named"):
        draft_worker(config, config.resolve(), 8, 64, Placement())
    options = {"model": "paceline-small", "drafter": "draft_model:paceline-small-draft,proposes=sampled"}
    with pytest.raises(CapabilityError, match="not decided on"):
        service("cpu", options, 8, 64)
