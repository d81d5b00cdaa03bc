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
SESSIONS = 100  # of `pagoda bench`
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


@app.command()
def bench(
    url: Annotated[str, URL_ARGUMENT] = DEFAULT_URL,
    file: Annotated[Path | None, typer.Option(help="JSONL: bodies of chat or completion requests.")] = None,
    trace: Annotated[Path | None, typer.Option(help="JSONL trace in Mooncake's form; arrival times are kept.")] = None,
    scale: Annotated[float, typer.Option(min=0.0001, help="Of a trace's lengths.")] = 1.0,
    speed: Annotated[float, typer.Option(min=0.0001, help="Of arrivals: 2 sends twice as fast.")] = 1.0,
    requests: Annotated[int | None, typer.Option(min=1, help="Sessions to send; default: the file's, or 100.")] = None,
    prompt_tokens: Annotated[str, typer.Option(help="Of generated prompts: N, or a range LEAST:MOST.")] = "128",
    output_tokens: Annotated[str, typer.Option(help="Of each answer, likewise.")] = "64",
    prefixes: Annotated[int, typer.Option(min=0, help="Different prefixes that prompts share.")] = 0,
    prefix_tokens: Annotated[int, typer.Option(min=0, help="Tokens of each prefix.")] = 256,
    turns: Annotated[int, typer.Option(min=1, help="Turns of a session.")] = 1,
    concurrency: Annotated[int | None, typer.Option(min=1, help="Clients that send one request each.")] = None,
    rate: Annotated[float | None, typer.Option(min=0.0001, help="Sessions a second, at random times.")] = None,
    slo: Annotated[list[str] | None, typer.Option(help="Limit of a good answer: ttft=MS, tpot=MS or e2e=MS.")] = None,
    seed: Annotated[int, typer.Option(help="Of prompts and arrivals.")] = 0,
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds of a request.")] = 600.0,
    model: Annotated[str, typer.Option(help="Name of the model; default: the server's.")] = "",
    out: Annotated[Path | None, typer.Option(help="Write all figures as JSON.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Write distributions and throughput as SVG.")] = None,
    key: Annotated[str | None, KEY_OPTION] = None,
) -> None:
    """Load a server and measure what its clients see.

    Requests are generated (token ids, answers of an exact length), or those of --file or --trace. Without --rate,
    --concurrency and arrival times, 16 clients send them. Exits with 1 if a request fails.
    """
    from deployments.cli.bench import workload as make
    from deployments.cli.bench.report import parse_slo
    from deployments.cli.bench.run import Options
    from deployments.cli.bench.run import bench as command
    from engine.errors import ConfigError

    described: dict[str, object] = {"requests": requests, "seed": seed}
    prompt, output = make.parse_length(prompt_tokens), make.parse_length(output_tokens)
    if file is not None and trace is not None:
        raise ConfigError("--file and --trace exclude each other; give one of them")
    if trace is not None:
        described |= {"trace": trace.name, "scale": scale, "speed": speed}
        workload = make.of_trace(trace, scale=scale, speed=speed, number=requests)
    elif file is not None:
        described |= {"file": file.name, "speed": speed}
        workload = make.of_file(file, speed=speed, number=requests, max_tokens=output.most)
    else:
        described |= {"prompt_tokens": prompt_tokens, "output_tokens": output_tokens, "turns": turns}
        described |= {"prefixes": prefixes, "prefix_tokens": prefix_tokens}
        shape = make.Generated(prompt, output, prefixes, prefix_tokens, turns)
        workload = make.generated(shape, requests or SESSIONS, seed)
    options = Options(url, key, model, concurrency, rate, seed, timeout, parse_slo(slo or ()), out, plot, described)
    raise typer.Exit(command(workload, options))


@app.command()
def batch(
    file: Annotated[Path, typer.Argument(help="JSONL of requests, as for /v1/batches.", show_default=False)],
    out: Annotated[Path, typer.Option(help="Results; an interrupted run is continued.", show_default=False)],
    url: Annotated[str | None, typer.Option(help="Base URL of a server; default: an engine of its own.")] = None,
    config: Annotated[Path, typer.Option(help="Serve config file with the options of that engine.")] = Path(
        "serve_config.yaml"
    ),
    concurrency: Annotated[int, typer.Option(min=1, help="Lines at once at a server.")] = 64,
    key: Annotated[str | None, KEY_OPTION] = None,
) -> None:
    """Run a batch of requests offline, or at a server; the same command continues it after an interruption.

    Each result is durable before it counts, and each line is answered once. Exits with 1 if lines have failed.
    """
    from deployments.batch.offline.run import OfflineBatch
    from deployments.cli.batch import batch as command

    raise typer.Exit(command(OfflineBatch(file, out, url, config, key or "", concurrency)))


@app.command()
def top(
    url: Annotated[str, URL_ARGUMENT] = DEFAULT_URL,
    interval: Annotated[float, typer.Option(min=0.2, help="Seconds between two updates.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Print one view and exit.")] = False,
    key: Annotated[str | None, KEY_OPTION] = None,
) -> None:
    """Watch a server: replicas, queues, KV blocks, hit rate, tokens/s, and why requests went where they did."""
    from deployments.cli.top.run import top as command

    raise typer.Exit(command(url, key, interval, once=once))
