"""Pictures of the playground of a running server: wide, and of a phone; light and dark.

    paceline serve smollm2-135m &
    python tools/show_playground.py http://127.0.0.1:8000 docs/measured/serving

Needs Debian's ``chromium`` and ``chromium-driver``.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import WebDriverWait

WAIT_S = 300.0
MESSAGE = "Write a JSON list of five cities with their country and population."
PICTURES = {"playground": (1200, 900, "light"), "playground-phone": (420, 860, "dark")}


def take(driver: webdriver.Chrome, url: str, message: str, name: str, out: Path) -> None:
    """Ask, wait for the answer and its plain run, and take one picture."""
    width, height, scheme = PICTURES[name]
    size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    look = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", look)
    driver.get(url)
    wait = WebDriverWait(driver, WAIT_S)
    wait.until(lambda d: d.find_element(By.ID, "state").text == "ready")
    driver.find_element(By.ID, "text").send_keys(message + "\n")
    wait.until(lambda d: "the same tokens" in d.find_element(By.ID, "speed").text)
    driver.save_screenshot(str(out / f"{name}.png"))


def main() -> None:
    """Take all of them."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("url")
    parser.add_argument("out", type=Path)
    parser.add_argument("--message", default=MESSAGE)
    asked = parser.parse_args()
    options = webdriver.ChromeOptions()
    for flag in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage"):
        options.add_argument(flag)
    options.binary_location = str(shutil.which("chromium"))
    driver = webdriver.Chrome(options, webdriver.ChromeService(str(shutil.which("chromedriver"))))
    try:
        for name in PICTURES:
            take(driver, asked.url, asked.message, name, asked.out)
    finally:
        driver.quit()


if __name__ == "__main__":
    main()
