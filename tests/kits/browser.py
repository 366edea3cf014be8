"""A headless Chromium for tests: Debian's `chromium` and `chromium-driver`, nothing downloaded."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webelement import WebElement

WAIT_S = 30.0
NEEDED = ("chromium", "chromedriver")
needs_chromium = pytest.mark.skipif(
    not all(map(shutil.which, NEEDED)), reason="chromium and chromium-driver are not installed"
)


class Browser:
    """A page in it."""

    def __init__(self, driver: webdriver.Chrome) -> None:
        self.driver = driver

    def open(self, url: str, width: int, height: int = 900) -> None:
        """A page in a window of this size, which is set inside: a headless window has a least width of its own."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        self.driver.get(url)

    def one(self, name: str) -> WebElement:
        """The element with this id."""
        return self.driver.find_element(By.ID, name)

    def all(self, selector: str) -> list[WebElement]:
        """Those that a CSS selector finds."""
        return self.driver.find_elements(By.CSS_SELECTOR, selector)

    def text(self, selector: str) -> str:
        """The text of the first one, shown or not."""
        return str(self.driver.execute_script("return document.querySelector(arguments[0])?.textContent", selector))

    def run(self, script: str, *given: Any) -> Any:
        """What a script returns."""
        return self.driver.execute_script(script, *given)

    def until(self, holds: Callable[[], Any], words: str) -> None:
        """Wait until something holds."""
        end = time.monotonic() + WAIT_S
        while not holds():
            assert time.monotonic() < end, f"not within {WAIT_S:g} s: {words}"
            time.sleep(0.03)

    def complaints(self) -> list[str]:
        """What the console says of errors, since this was last asked."""
        return [str(line["message"]) for line in self.driver.get_log("browser") if line["level"] == "SEVERE"]


@contextmanager
def browser() -> Iterator[Browser]:
    """A browser with a profile of its own; it has ended when this ends."""
    options = webdriver.ChromeOptions()
    for flag in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu", "--disable-extensions"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    options.binary_location = str(shutil.which("chromium"))
    driver = webdriver.Chrome(options, webdriver.ChromeService(str(shutil.which("chromedriver"))))
    try:
        yield Browser(driver)
    finally:
        driver.quit()
