"""The command line of `pagoda`: its commands, their options and the exit codes.

0: success; 1: what was asked failed, and stderr says why; 2: wrong usage; 130: interrupted.
"""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from deployments.cli.console import print_error
from engine.errors import PagodaError

__all__ = ["app", "main"]

FAILED = 1
INTERRUPTED = 130

app = typer.Typer(
    help="Serve language models, and look after a server.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
config_app = typer.Typer(help="Work with config files.", no_args_is_help=True)
app.add_typer(config_app, name="config")


def main() -> None:
    """Run the command of ``sys.argv`` and exit with its code."""
    try:
        app(prog_name="pagoda")
    except PagodaError as error:
        print_error(str(error))
        sys.exit(FAILED)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)


@app.callback(invoke_without_command=True)
def _pagoda(
    version: Annotated[bool, typer.Option("--version", help="Show the version and exit.")] = False,
) -> None:
    if version:
        from deployments.version import pagoda_version

        typer.echo(f"pagoda {pagoda_version()}")
        raise typer.Exit


KEY_OPTION = typer.Option("--key", envvar="PAGODA_API_KEY", show_envvar=True, help="API key of the server.")
URL_ARGUMENT = typer.Argument(help="Base URL of the server.", show_default=True)
DEFAULT_URL = "http://127.0.0.1:8000"


@app.command()
def doctor(
    target: Annotated[
        str | None,
        typer.Argument(help="URL of a running server, or a model's directory or GGUF file; default: this machine."),
    ] = None,
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port on which a server is to listen.")] = 8000,
    key: Annotated[str | None, KEY_OPTION] = None,
) -> None:
    """Check this machine, a model's files, or a running server, and say what to do about each problem.

    Exits with 1 if something prevents a server from working. Looks nothing up on the network.
    """
    from deployments.cli.doctor.run import diagnose

    raise typer.Exit(diagnose(target, port, key))
