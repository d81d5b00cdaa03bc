"""python -m demo.screenshots URL: takes the README's pictures of the web page from a running server.

It asks two questions in the playground beside other conversations, and saves the page in light and in dark under
demo/screenshots; the second prompt begins with the first one and its answer, which one replica holds. On a page as wide
as a phone it asks for a sum, for which the model calls the calculator.
"""

from __future__ import annotations

import json
import random
import sys
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, Page, sync_playwright

from deployments.launcher.direct import direct_urlopen

__all__ = ["CHROMIUM", "FLAGS"]

CHROMIUM = Path("/usr/bin/chromium")
FLAGS = [
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
FOLDER = Path(__file__).with_name("screenshots")
CLIENTS = 10
WARM_UP_S = 75.0  # so that the charts have data and the caches are not full
RUSH_S = 5.0
TOPICS = ("a KV cache", "paged attention", "continuous batching", "prefix caching", "chunked prefill", "a block table")
SYSTEMS = ("You answer questions about LLM serving. " * 6, "You are a patient teacher of systems. " * 8)


def main(url: str) -> None:
    """Take all pictures."""
    with Clients(url) as clients, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=str(CHROMIUM), args=FLAGS)
        FOLDER.mkdir(exist_ok=True)
        wide = opened(browser, url, width=1440, height=960)
        ask(wide, "What is a KV cache?")
        time.sleep(WARM_UP_S)
        ask(wide, "Can you give an example?")
        clients.hurry()
        save(wide, "light")
        wide.emulate_media(color_scheme="dark")
        save(wide, "dark")
        phone = opened(browser, url, width=375, height=812)
        time.sleep(15)
        phone.get_by_label("Tools").check()
        ask(phone, "What is 12 * 34?")
        save(phone, "phone", full_page=True)
        browser.close()


def opened(browser: Browser, url: str, *, width: int, height: int) -> Page:
    """Open the page, in light colours."""
    page = browser.new_page(viewport={"width": width, "height": height}, color_scheme="light")
    page.goto(url)
    return page


def ask(page: Page, question: str) -> None:
    """Send a question and wait for the complete answer."""
    answers = page.locator(".message.assistant")
    before = answers.count()
    page.get_by_label("Prompt", exact=True).fill(question)
    page.keyboard.press("Enter")
    page.wait_for_function("n => document.querySelectorAll('.assistant[data-state=done]').length > n", arg=before)
    page.wait_for_timeout(1200)


def save(page: Page, name: str, *, full_page: bool = False) -> None:
    """Save a picture of the page."""
    page.screenshot(path=FOLDER / f"{name}.png", full_page=full_page)


class Clients:
    """Clients that chat with the server while the block runs, with pauses at first."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._over, self._hurry = threading.Event(), threading.Event()
        self._threads = [threading.Thread(target=self._talk, args=(number,)) for number in range(CLIENTS)]

    def __enter__(self) -> Clients:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()

    def hurry(self) -> None:
        """Make the clients send without pauses, for several long answers each, and wait until the charts show it."""
        self._hurry.set()
        time.sleep(RUSH_S)

    def _talk(self, number: int) -> None:
        rng = random.Random(number)
        while not self._over.is_set():
            messages: list[dict[str, Any]] = [{"role": "system", "content": rng.choice(SYSTEMS)}]
            for _ in range(4):
                messages.append({"role": "user", "content": f"What is {rng.choice(TOPICS)}?"})
                size = {"n": 3, "max_tokens": 240} if self._hurry.is_set() else {"max_tokens": rng.choice((60, 120))}
                body = {"messages": messages, "ignore_eos": True, **size}
                answer = _post(f"{self._url}/v1/chat/completions", body)
                messages.append(answer["choices"][0]["message"])
                if self._over.wait(0.0 if self._hurry.is_set() else rng.uniform(1.0, 4.0)):
                    return


def _post(url: str, body: dict[str, Any]) -> dict[str, Any]:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with direct_urlopen(request, timeout=60) as answer:
        result: dict[str, Any] = json.load(answer)
        return result


if __name__ == "__main__":
    main(sys.argv[1].rstrip("/"))
