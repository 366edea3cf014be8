"""A tiny draft model with sessions, here and in a worker."""

from __future__ import annotations

from typing import Any

import torch
from kits.tiny import draft_model, tiny_decoder

from paceline.runtime.drafts import DraftService
from paceline.runtime.handshake import Facts


def bound() -> Any:
    """Sessions of a draft of the tiny target; the same ones in every process."""
    torch.manual_seed(0)
    drafter = draft_model(noise=0.2, depth=4)
    drafter.bind(tiny_decoder().info("tiny"), 4, 1024, torch.device("cpu"))
    return drafter.sessions(64)


def service(device: str) -> DraftService:
    """What a worker makes."""
    return DraftService(bound(), Facts(weights="tiny"))
