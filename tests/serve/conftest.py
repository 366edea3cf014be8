"""Servers that suites share: one with its model's own template, and one with a template for tools."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest
from kits.server import LiveServer, live_server

OPTIONS = (
    "--drafter",
    "hybrid:grammar+prediction+ngram",
    "--budget",
    "4",
)  # an automatic budget would depend on the time that steps take


@pytest.fixture(scope="session")
def server() -> Iterator[LiveServer]:
    with live_server(*OPTIONS) as made:
        yield made


@pytest.fixture(scope="session")
def client(server: LiveServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="session")
def hermes() -> Iterator[LiveServer]:
    with live_server("--chat-template", "hermes", *OPTIONS) as made:
        yield made


@pytest.fixture(scope="session")
def hermes_client(hermes: LiveServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{hermes.url}/v1", api_key="none", max_retries=0)
