"""The terminal of `pagoda chat`: reads lines and commands, shows answers as they come."""

from __future__ import annotations

import sys
from contextlib import suppress
from pathlib import Path

from rich.console import Console

from deployments.cli.chat.answer import Answer
from deployments.cli.chat.conversation import Conversation, Settings
from deployments.cli.client import ServerClient, ServerError
from deployments.cli.console import open_console, print_error
from engine.errors import PagodaError

__all__ = ["chat"]

PROMPT = "you> "
HELP = """/system [TEXT]  set the system message; without a text: remove it
/tools on|off   offer the model a calculator and the cluster's figures
/history        show the conversation
/save FILE      write the conversation as JSON
/new            begin another conversation
/quit           end (Ctrl-D)
Ctrl-C stops an answer."""


def chat(url: str, key: str | None, settings: Settings) -> int:
    """Talk to the model until the input ends; return the exit code.

    Args:
        url: of the server.
        key: API key.
        settings: of the requests; an empty model takes the server's.

    Raises:
        ServerError: no server answers there.
    """
    client = ServerClient(url, key)
    settings.model = settings.model or client.get("/v1/models").json()["data"][0]["id"]
    console = open_console()
    console.print(f"{settings.model} at {client.url}; /help shows the commands, Ctrl-D ends", markup=False)
    with suppress(ImportError):
        import readline  # noqa: F401  # input() then edits lines and recalls earlier ones
    terminal = _Terminal(console, Conversation(client, settings))
    while (line := _read_line()) is not None:
        if not terminal.handle(line.strip()):
            break
    return 0


def _read_line() -> str | None:
    """Return the next line; None at the end of the input."""
    while True:
        try:
            return input(PROMPT if sys.stdin.isatty() else "")
        except EOFError:
            print(flush=True)
            return None
        except KeyboardInterrupt:
            print("\n(Ctrl-D ends)", flush=True)


class _Terminal:
    def __init__(self, console: Console, conversation: Conversation) -> None:
        self._console = console
        self._conversation = conversation
        self._has_reasoning = False

    def handle(self, line: str) -> bool:
        """Ask the model, or run a command; return False if it ends the chat."""
        if line in ("/quit", "/exit"):
            return False
        try:
            if line.startswith("/"):
                self._command(*line.partition(" ")[::2])
            elif line:
                self._ask(line)
        except PagodaError as error:
            print_error(str(error))
        return True

    def _ask(self, question: str) -> None:
        before = len(self._conversation.messages) + 1
        try:
            for answer in self._conversation.ask(question, self._show):
                self._end(answer, before)
        except ServerError:
            self._console.print()
            raise

    def _show(self, reasoning: str, text: str) -> None:
        if reasoning:
            self._has_reasoning = True
            self._write(reasoning, "dim italic")
        if text:
            if self._has_reasoning:
                self._has_reasoning = False
                self._write("\n")
            self._write(text)

    def _write(self, text: str, style: str = "") -> None:
        self._console.print(text, style=style, end="", markup=False, highlight=False, emoji=False, soft_wrap=True)

    def _end(self, answer: Answer, before: int) -> None:
        self._has_reasoning = False
        if answer.text or not answer.calls:
            self._console.print()
        for call in answer.calls:
            function = call["function"]
            self._write(f"[calls {function['name']} {function['arguments']}]\n", "cyan")
        self._write(f"({answer.facts})\n", "dim")

    def _command(self, name: str, text: str) -> None:
        conversation, settings, text = self._conversation, self._conversation.settings, text.strip()
        match name:
            case "/help":
                self._write(f"{HELP}\n")
            case "/system":
                settings.system = text
                self._write("the system message is set\n" if text else "there is no system message\n")
            case "/tools" if text in ("on", "off"):
                settings.use_tools = text == "on"
                self._write(f"tools are {text}\n")
            case "/history":
                for message in conversation.messages:
                    self._write(f"{message['role']}: {message['content']}\n")
            case "/save" if text:
                path = Path(text).expanduser()
                conversation.save(path)
                self._write(f"{len(conversation.messages)} messages are in {path}\n")
            case "/new":
                conversation.messages.clear()
                self._write("a new conversation\n")
            case _:
                self._write(f"{f'{name} {text}'.strip()!r} is not a command; /help shows them\n")
