"""The server that suites share, with a template for tools, its clients, and the same model without a server."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest
from kits.server import LiveServer, live_server

from paceline import LLM
from paceline.serve.config import ServeConfig

TEMPLATE = "hermes"
DRAFTER = "hybrid:grammar+prediction+ngram"


@pytest.fixture(scope="session")
def server() -> Iterator[LiveServer]:
    """An automatic budget would depend on the time that steps take."""
    with live_server("--chat-template", TEMPLATE, "--drafter", DRAFTER, "--budget", "4") as made:
        yield made


@pytest.fixture(scope="session")
def client(server: LiveServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="session")
def offline() -> LLM:
    made = LLM("paceline-small", threads=1)
    made.tokenizer.chat_template = ServeConfig(chat_template=TEMPLATE).template()
    return made
