"""python -m demo.screenshots URL: the pictures of the web page in the README, taken from a server that runs.

It keeps the server busy with conversations, asks something in the playground, and saves the page in light, in dark and
as wide as a phone under demo/screenshots.
"""

from __future__ import annotations

import json
import random
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, Page, sync_playwright

__all__ = ["CHROMIUM", "FLAGS"]

CHROMIUM = Path("/usr/bin/chromium")
FLAGS = [
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
]  # fmt: skip
FOLDER = Path(__file__).with_name("screenshots")
CLIENTS = 10
WARM_UP_S = 85.0  # so that the charts show something, and the caches are not full
TOPICS = ("a KV cache", "paged attention", "continuous batching", "prefix caching", "chunked prefill", "a block table")
SYSTEMS = ("You answer questions about LLM serving. " * 6, "You are a patient teacher of systems. " * 8)


def main(url: str) -> None:
    """Take all pictures."""
    with busy(url), sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=str(CHROMIUM), args=FLAGS)
        FOLDER.mkdir(exist_ok=True)
        wide = conversation(browser, url, width=1440, height=960)
        time.sleep(WARM_UP_S)
        ask(wide, "How does prefix caching work?")
        save(wide, "light")
        wide.emulate_media(color_scheme="dark")
        ask(wide, "What is continuous batching?")
        save(wide, "dark")
        phone = conversation(browser, url, width=375, height=812)
        time.sleep(15)
        save(phone, "phone", full_page=True)
        browser.close()


def conversation(browser: Browser, url: str, *, width: int, height: int) -> Page:
    """Open the page and ask a first question."""
    page = browser.new_page(viewport={"width": width, "height": height}, color_scheme="light")
    page.goto(url)
    ask(page, "What is a KV cache?")
    return page


def ask(page: Page, question: str) -> None:
    """Ask, and wait for the whole answer."""
    answers = page.locator(".message.assistant")
    before = answers.count()
    page.get_by_label("Prompt", exact=True).fill(question)
    page.keyboard.press("Enter")
    page.wait_for_function("n => document.querySelectorAll('.assistant[data-state=done]').length > n", arg=before)
    page.wait_for_timeout(1200)


def save(page: Page, name: str, *, full_page: bool = False) -> None:
    """Save what is seen."""
    page.screenshot(path=FOLDER / f"{name}.png", full_page=full_page)


@contextmanager
def busy(url: str) -> Iterator[None]:
    """Let several clients talk to the server while the block runs."""
    over = threading.Event()
    clients = [threading.Thread(target=_talk, args=(url, number, over)) for number in range(CLIENTS)]
    for client in clients:
        client.start()
    try:
        yield
    finally:
        over.set()
        for client in clients:
            client.join()


def _talk(url: str, number: int, over: threading.Event) -> None:
    rng = random.Random(number)
    while not over.is_set():
        messages: list[dict[str, Any]] = [{"role": "system", "content": rng.choice(SYSTEMS)}]
        for _ in range(4):
            messages.append({"role": "user", "content": f"What is {rng.choice(TOPICS)}?"})
            body = {"messages": messages, "max_tokens": rng.choice((60, 120, 200)), "ignore_eos": True}
            answer = _post(f"{url}/v1/chat/completions", body)
            messages.append(answer["choices"][0]["message"])
            if over.wait(rng.uniform(1.0, 4.0)):
                return


def _post(url: str, body: dict[str, Any]) -> dict[str, Any]:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        result: dict[str, Any] = json.load(answer)
        return result


if __name__ == "__main__":
    main(sys.argv[1].rstrip("/"))
