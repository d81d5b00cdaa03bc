"""The command line of `pagoda`: its commands, their options and the exit codes.

0: success; 1: what was asked failed, and stderr says why; 2: wrong usage; 130: interrupted.
"""

from __future__ import annotations

import sys
from pathlib import Path
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


@config_app.command("check")
def config_check(
    file: Annotated[Path, typer.Argument(help="A Serve config file.", show_default=True)] = Path("serve_config.yaml"),
) -> None:
    """Validate a config file and say what it would start: replicas, memory, KV blocks, tokens.

    Exits with 1 at the first mistake, whose key, value and remedy are printed.
    """
    from deployments.cli.serving.check import check_file

    raise typer.Exit(check_file(file))


@app.command()
def serve(
    model: Annotated[
        str | None, typer.Argument(help="A checkpoint's directory, a GGUF file, or `demo`; default: the demo.")
    ] = None,
    config: Annotated[Path | None, typer.Option(help="A Serve config file to start from.")] = None,
    changes: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Set a key, e.g. engine.max_model_len=4096.")
    ] = None,
    print_config: Annotated[bool, typer.Option("--print-config", help="Write the YAML and start nothing.")] = False,
) -> None:
    """Serve a model on this machine until Ctrl-C, as `make serve` does.

    Keys of --set are those of docs/configuration.md, or http_options.port and the like; values are YAML.
    Nothing is downloaded, and no network is needed.
    """
    from deployments.cli.serving import serve as command

    run = command.print_config if print_config else command.serve
    raise typer.Exit(run(model, config, changes or []))


@app.command()
def chat(
    url: Annotated[str, URL_ARGUMENT] = DEFAULT_URL,
    model: Annotated[str, typer.Option(help="Name of the model; default: the server's.")] = "",
    system: Annotated[str, typer.Option(help="System message.")] = "",
    tools: Annotated[bool, typer.Option("--tools", help="Offer a calculator and the cluster's figures.")] = False,
    temperature: Annotated[float | None, typer.Option(min=0.0)] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1)] = None,
    key: Annotated[str | None, KEY_OPTION] = None,
) -> None:
    """Talk to a model in the terminal.

    Shows of each answer the time to its first token, tokens per second, and how much of the prompt was cached.
    """
    from deployments.cli.chat.conversation import Settings
    from deployments.cli.chat.terminal import chat as command

    raise typer.Exit(command(url, key, Settings(model, system, tools, temperature, max_tokens)))
