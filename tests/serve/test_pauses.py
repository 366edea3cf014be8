"""What would hold up every stream at once does not happen while there are any."""

from __future__ import annotations

import gc

import pytest

from paceline.api.options import LLMOptions
from paceline.runtime.engine_worker import EngineService, service


@pytest.fixture(autouse=True)
def nothing_frozen():
    gc.unfreeze()
    yield
    gc.unfreeze()
    gc.freeze()  # as it was


def test_collections_of_the_engine_look_at_nothing_old() -> None:
    options = vars(LLMOptions(model="paceline-small-draft", threads=1, max_model_len=256, drafter="suffix")).copy()
    del options["device"]
    made = service("cpu", options)
    assert isinstance(made, EngineService) and gc.get_freeze_count() > 50_000
