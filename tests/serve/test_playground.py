"""The playground in a real browser: what it does, wide and narrow."""

from __future__ import annotations

from collections.abc import Iterator

import httpx2 as httpx
import pytest
from kits.browser import Browser, browser, needs_chromium
from kits.server import LiveServer, live_server

KEYS, KEY = "PACELINE_API_KEYS", "a-key"
HTML = '<img src=x onerror="document.title=1"><b>bold</b>'
LONG = '{"type": "string", "minLength": 9999}'  # an answer that takes a while
SCHEMA = """{"type": "object", "properties": {"name": {"enum": ["Ada", "Bob"]}},
 "required": ["name"], "additionalProperties": false}"""


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    options = ("--drafter", "hybrid:grammar+ngram+suffix", "--budget", "4")  # automatic ones may draft nothing
    with live_server(*options, environment={KEYS: KEY}) as made:
        yield made


@pytest.fixture(scope="module")
def page() -> Iterator[Browser]:
    with browser() as made:
        yield made


def opened(page: Browser, server: LiveServer, width: int = 1200) -> None:
    """The page, with its key, ready."""
    page.complaints()  # those of pages before it
    page.open(server.url, width)
    page.until(lambda: page.one("key-form").is_displayed(), "it asks for a key")
    page.one("key").send_keys(KEY + "\n")
    ready(page)


def ready(page: Browser) -> None:
    page.until(lambda: page.text("#state") in ("ready", "stopped", "refused"), "it is ready")


def put(page: Browser, name: str, value: str) -> None:
    """Write into a field, also one that is folded away or out of sight."""
    script = (
        "const at = document.getElementById(arguments[0]); at.value = arguments[1];"
        "at.dispatchEvent(new Event('input', {bubbles: true}))"
    )
    page.run(script, name, value)


def switch(page: Browser, source: str) -> None:
    page.run("document.querySelector(`#sources input[value='${arguments[0]}']`).click()", source)


@needs_chromium
@pytest.mark.parametrize("width", [1200, 420])
def test_a_message_is_answered_and_compared(page: Browser, server: LiveServer, width: int) -> None:
    opened(page, server, width)
    put(page, "tokens", "60")
    page.one("text").send_keys(f"{HTML}\n")
    page.until(lambda: "the same tokens" in page.text("#speed"), "the plain run has ended")
    assert page.text("#log .user").endswith(HTML)  # as text
    assert not page.all("#log b, #log img") and page.driver.title == "Paceline playground"
    answer = page.run("return [...document.querySelectorAll('#log .model .token')].map(t => [t.textContent, t.title])")
    assert len(answer) > 20 and any("depth" in title for _, title in answer)
    assert {title for _, title in answer} & {"the target's own"}
    assert len(page.all("#tree rect")) > 1 and page.one("tree").get_attribute("aria-label").startswith("Step ")
    steps = sum(int(cell.get_attribute("textContent")) for cell in page.all("#lengths td:nth-child(2)"))
    assert steps == int(page.one("step").get_attribute("max")) > 1
    fullest = page.run("return steps.findIndex(s => s.path.length === Math.max(...steps.map(t => t.path.length))) + 1")
    assert page.one("step").get_attribute("value") == str(fullest)  # the slider stands at the step that is shown
    assert page.text("#step-says").startswith(f"Step {fullest}:")
    page.run("const at = document.getElementById('step'); at.value = 1; at.dispatchEvent(new Event('input'))")
    assert page.text("#step-says").startswith("Step 1:")
    assert page.run("return document.documentElement.scrollWidth") <= width
    assert KEY not in page.run("return document.documentElement.outerHTML") and "$PACELINE_KEY" in page.text("#curl")
    assert not [line for line in page.complaints() if "401" not in line]


@needs_chromium
def test_stop_sources_schema_and_errors(page: Browser, server: LiveServer) -> None:
    opened(page, server)
    page.run(  # a click when the first tokens are there: one from here may come after the end of the answer
        "const log = document.getElementById('log'); new MutationObserver((_, self) => {"
        "if (log.querySelectorAll('.token').length > 3) { self.disconnect(); document.getElementById('stop').click() }"
        "}).observe(log, {childList: true, subtree: true})"
    )
    begin(page)
    page.until(lambda: page.text("#state") == "stopped", "it stops")
    assert page.text("#log .end").endswith("stopped")
    page.until(lambda: load(server) == 0, "the request has ended at the server, too")

    page.one("clear").click()
    for source in ("ngram", "suffix"):
        switch(page, source)
    put(page, "schema", SCHEMA)
    assert '"sources": [\n   "grammar"\n  ]' in page.text("#curl") and '"json_schema"' in page.text("#curl")
    page.one("text").send_keys("Who?\n")
    page.until(lambda: "plainly" in page.text("#speed") and page.text("#state") == "ready", "it has ended")
    said = page.run("return [...document.querySelectorAll('#log .token')].map(t => t.textContent).join('')")
    assert said in ('{"name":"Ada"}', '{"name":"Bob"}')
    drafted = page.run("return [...document.querySelectorAll('#legend tr')].map(r => r.innerText.split('\\t'))")
    counts = {row[0]: row[1:] for row in drafted}
    assert int(counts["grammar"][1]) > 0 and counts["ngram"] == counts["suffix"] == ["0", "0"]

    put(page, "schema", "{")
    page.one("text").send_keys("Who?\n")
    assert "no JSON" in page.text("#problem")
    put(page, "schema", '{"type": "nothing"}')
    said = page.text("#log")
    page.one("send").click()
    page.until(lambda: page.text("#state") == "refused", "the server refuses it")
    assert "nothing" in page.text("#problem") and page.one("text").get_attribute("value") == "Who?"
    assert page.text("#log") == said  # the message stands in its box alone


def begin(page: Browser) -> None:
    """An answer has begun that does not end soon."""
    put(page, "tokens", "1900")
    put(page, "schema", LONG)
    page.one("text").send_keys("Count.\n")
    page.until(lambda: len(page.all("#log .token")) > 3, "the answer has begun")


def load(server: LiveServer) -> int:
    answer = httpx.get(f"{server.url}/load", headers={"authorization": f"Bearer {KEY}"})
    return int(answer.json()["server_load"])
