"""What would hold up every stream at once does not happen while there are any."""

from __future__ import annotations

import asyncio
import gc
from types import SimpleNamespace
from typing import Any

import pytest

from paceline.distributed.requests import Description
from paceline.engine_worker import EngineService, service
from paceline.options import LLMOptions
from paceline.serve.config import ServeConfig
from paceline.serve.generation import Server


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


def test_texts_are_there_before_the_first_chat_and_collections_are_short() -> None:
    described = Description("m", 8, 8, [1], [], None, {}, {}, {}, {})

    async def prepared() -> Server:
        event = asyncio.Event()
        client: Any = SimpleNamespace(described=event, description=None)
        server = Server(ServeConfig(), client, "m")
        task = asyncio.ensure_future(server.prepare())
        await asyncio.sleep(0.05)
        assert not task.done() and server._texts is None
        client.description = described
        event.set()
        await task
        return server

    server = asyncio.run(prepared())
    assert server._texts is not None and gc.get_freeze_count() > 50_000
