"""`pagoda top`: polls the server, and shows its state until Ctrl-C."""

from __future__ import annotations

import time
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.text import Text

from deployments.cli.client import ServerClient, ServerError
from deployments.cli.console import open_console
from deployments.cli.top.history import History
from deployments.cli.top.view import render

__all__ = ["top"]

LINES_BESIDE_ROUTED = 8  # of the view, without replicas and requests
ONCE_AFTER_S = 1.5  # between the two answers of --once, whose difference gives the rates


def top(url: str, key: str | None, interval_s: float, *, once: bool) -> int:
    """Show the server's state until the user interrupts; return the exit code.

    Args:
        url: of the server.
        key: API key.
        interval_s: seconds between two answers.
        once: print one view, also where there is no terminal, and return.

    Raises:
        ServerError: the server does not answer at the start, or has no live view.
    """
    client, console, history = ServerClient(url, key), open_console(), History()
    state = _state(client)
    history.add(state)
    if once or not console.is_terminal:
        time.sleep(ONCE_AFTER_S)
        state = _state(client)
        history.add(state)
        console.print(_view(console, client, state, history))
        return 0
    try:
        _follow(console, client, state, history, interval_s)
    except KeyboardInterrupt:
        return 0
    return 0


def _follow(console: Console, client: ServerClient, state: dict[str, Any], history: History, interval_s: float) -> None:
    with Live(_view(console, client, state, history), console=console, screen=True, auto_refresh=False) as live:
        is_lost = False
        while True:
            time.sleep(interval_s)
            try:
                state = _state(client)
            except ServerError as error:  # it may come back: a restart, a network that has failed
                message = f"{error}\n\nasking again every {interval_s:g} s; Ctrl-C ends"
                live.update(Text(message, style="red"), refresh=True)
                is_lost = True
                continue
            if history.add(state) or is_lost:
                is_lost = False
                live.update(_view(console, client, state, history), refresh=True)


def _view(console: Console, client: ServerClient, state: dict[str, Any], history: History) -> Any:
    num_routed = max(5, console.height - LINES_BESIDE_ROUTED - len(state["replicas"]))
    return render(state, history, client.url, num_routed)


def _state(client: ServerClient) -> dict[str, Any]:
    try:
        state: dict[str, Any] = client.get("/live").json()
    except ServerError as error:
        if error.status != 404:
            raise
        message = f"{client.url} has no live view; start it with `web: true` and `task: generate`"
        raise ServerError(message, 404) from None
    return state
