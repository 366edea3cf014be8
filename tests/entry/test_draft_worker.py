"""The drafter of an `LLM`, built again from what its worker is told, is the same drafter."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
import torch

from paceline.assembly.drafting import build_drafter
from paceline.assembly.engine import load_target
from paceline.config import LLMConfig
from paceline.core.errors import CapabilityError, ConfigError
from paceline.core.sampling import SamplingParams
from paceline.distributed.placement import Placement, cores
from paceline.draft_worker import draft_worker, named, serve_apart, service
from paceline.drafters import registry
from paceline.drafters.sessions import ROOT, Ask, Opening
from paceline.rounds.base import Place

STRETCHED = "draft_model:<stretch:paceline-small-draft,times=4>,depth=2"
DRAFTER = "draft_model:paceline-small-draft,depth=3"


def test_it_drafts_what_the_drafter_here_drafts():
    config = LLMConfig(model="paceline-small-draft", drafter=DRAFTER, max_sequences=2)
    spec = draft_worker(config, 40, 512, Placement())
    made = service("cpu", **json.loads(json.dumps(spec.options)))
    assert made.facts == spec.expected and len(made.facts.weights) == len(made.facts.vocabulary) == 64
    target = load_target(config)
    drafter: Any = build_drafter(config, target, 0)
    drafter.bind(target.decoder.info(target.name, target.tokenizer), 2, 512, torch.device("cpu"))
    sessions = [drafter.sessions(40), made.sessions]
    tokens = target.tokenizer.encode("SELECT name FROM players WHERE")
    for one in sessions:
        one.open(Opening(0, tokens, len(tokens), SamplingParams(temperature=0), 0, 0))
    here, there = (one.grow([Ask(0, [(ROOT, 100)], [ROOT], 3)])[0] for one in sessions)
    assert here == there and len(here.tokens) == 6


@pytest.mark.parametrize("drafter", ["ngram,depth=3", "suffix,depth=3"])
def test_drafters_without_a_model(drafter: str):
    config = LLMConfig(model="paceline-small-draft", drafter=drafter)
    spec = draft_worker(config, 40, 512, Placement())
    made = service("cpu", **json.loads(json.dumps(spec.options)))
    assert made.facts == spec.expected and made.facts.weights == ""
    made.sessions.open(Opening(0, [1, 2, 3, 1, 2], 5, SamplingParams(temperature=0), 0, 0))
    (grown,) = made.sessions.grow([Ask(0, [(ROOT, 3)], [ROOT])])
    assert grown.tokens == [1, 3]


@pytest.mark.parametrize("text", [DRAFTER, "ngram", "ngram,min_ngram=2", "draft_model:x,branching=1x1x3", STRETCHED])
def test_a_drafter_in_words(text: str):
    chosen: Any = registry.parse(text)
    assert chosen is not None and registry.parse(named(chosen)) == chosen
    assert text != STRETCHED or (chosen.model, chosen.depth) == ("stretch:paceline-small-draft,times=4", 2)


def test_what_reads_and_writes_no_text_is_not_imported():
    """It takes longer than all else that a drafter's process does before it can draft."""
    options = draft_worker(LLMConfig(model="paceline-small", drafter=DRAFTER), 40, 512, Placement()).options
    made = f"from paceline.draft_worker import service; service('cpu', **json.loads({json.dumps(options)!r}))"
    code = f"import sys, json; {made}; sys.exit('transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 0


def test_what_cannot_be():
    with pytest.raises(ConfigError, match="no drafter is named"):
        draft_worker(LLMConfig(model="paceline-small"), 8, 64, Placement())
    options = {"model": "paceline-small", "drafter": "draft_model:paceline-small-draft,proposes=sampled"}
    with pytest.raises(CapabilityError, match="not decided on"):
        service("cpu", options, 8, 64)


@pytest.mark.parametrize(
    ("chosen", "said"), [((4096,), "core 4096 is none"), (tuple(cores()), "no core is left for the target")]
)
def test_cores_that_cannot_be(chosen: tuple[int, ...], said: str):
    with pytest.raises(ConfigError, match=said):
        serve_apart(LLMConfig(model="paceline-small", drafter=DRAFTER), 64, 8, Place(chosen))
