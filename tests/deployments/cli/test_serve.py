"""`pagoda serve`: the config file that it makes, and the bars that its start shows."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console

from deployments.cli.models import find_model
from deployments.cli.serving.document import as_yaml, make_document
from deployments.cli.serving.progress import StartBars
from deployments.config import checkout_root
from deployments.launcher.preflight import check_document
from engine.errors import ConfigError
from tests.deployments.cli.terminal import run, unwrapped

DEMO = checkout_root() / "demo/model"


def _args(document: dict[str, Any]) -> dict[str, Any]:
    args: dict[str, Any] = document["applications"][0]["args"]
    return args


def test_the_config_of_the_demo_from_another_directory(tmp_path: Path) -> None:
    code, text = run("serve", "demo", "--print-config", "--set", "http_options.port=9000", cwd=tmp_path)
    assert code == 0, text
    printed = yaml.safe_load(text)
    shipped = yaml.safe_load((checkout_root() / "serve_config.yaml").read_text())
    shipped["http_options"]["port"] = 9000
    _args(shipped)["model"] = str(DEMO)
    assert printed == shipped


def test_the_config_of_a_checkpoint_has_defaults_and_nothing_of_the_demo(tmp_path: Path) -> None:
    document = make_document(str(DEMO), None, ["replicas.num_engine_replicas=3", "engine.dtype=float32"])
    expected = {"model": str(DEMO), "replicas": {"num_engine_replicas": 3}, "engine": {"dtype": "float32"}}
    assert _args(document) == expected
    endpoint, config = check_document(yaml.safe_load(as_yaml(document)))
    assert (endpoint.model, endpoint.url) == ("model", "http://127.0.0.1:8000")
    assert config.replicas.num_engine_replicas == 3


def test_a_model_and_a_file(tmp_path: Path) -> None:
    file = tmp_path / "my.yaml"
    file.write_text(as_yaml(make_document(None, None, ["model_name=mine", "model=elsewhere"])))
    document = make_document(str(DEMO), file)
    assert (_args(document)["model"], _args(document)["model_name"]) == (str(DEMO), "mine")
    assert _args(make_document(None, file))["model"] == "elsewhere"


@pytest.mark.parametrize("change", ["replicas", "=1", "a..b=1", "model=[1", "web.x=1"])
def test_malformed_changes(change: str) -> None:
    with pytest.raises(ConfigError, match=r"--set="):
        make_document("demo", None, [change])


def test_an_invalid_option_ends_with_one_line(tmp_path: Path) -> None:
    code, text = run("serve", "demo", "--set", "engine.block_sizes=16")
    assert code == 1
    assert unwrapped(text) == "pagoda: unknown engine option 'block_sizes'; did you mean 'block_size'?"


def test_names_of_hubs_are_not_downloaded() -> None:
    with pytest.raises(ConfigError, match="hf download Qwen/Qwen3-8B --local-dir DIR"):
        find_model("Qwen/Qwen3-8B")


# --- bars -------------------------------------------------------------------------------------------------------------


def _details(engines: int) -> dict[str, Any]:
    numbers = {"engine": engines, "ingress": 1}
    deployments = {name: {"target_num_replicas": number, "replicas": []} for name, number in numbers.items()}
    return {"applications": {"pagoda": {"status": "DEPLOYING", "deployments": deployments}}}


def _line(replica: str, message: str) -> str:
    return f"INFO 2026-11-27 07:47:39,044 pagoda_{replica} -- {message}"


def _shown(bars: StartBars, name: str) -> tuple[float, float | None, str]:
    task = next(task for task in bars._progress.tasks if task.description == name)
    return task.completed, task.total, task.fields["text"]


def test_the_bars_follow_the_replicas_logs() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=100)
    with StartBars(console) as bars:
        bars.see_details({})
        assert _shown(bars, "Ray") == (0, None, "starts")
        bars.see_details(_details(2))
        assert _shown(bars, "Ray") == (1, 1, "runs")
        for replica in ("engine aaa", "ingress ccc"):
            bars.see_line(_line(replica, "Started initializing replica."))
        assert _shown(bars, "replicas") == (2, 3, "2 of 3")
        bars.see_line(_line("engine aaa", "Compiling the CPU kernels, once for this machine"))
        assert _shown(bars, "load")[2] == "compiling the C kernels, once for this machine"
        bars.see_line(_line("engine aaa", "Loading weights: 4.0 of 16.0 GB (25%), about 9 seconds to go"))
        assert _shown(bars, "load") == (0.25, 2, "0.25 of 2")
        bars.see_line(_line("engine aaa", ""))
        bars.see_line("Loading weights:  50%|#####     | 4.19M/8.37M [00:00<00:00, 912MB/s]")
        bars.see_line(_line("ingress ccc", "Loading weights: 99%"))
        assert _shown(bars, "load")[0] == 0.5
        bars.see_line(_line("engine aaa", "Model loading took 0.01 GiB and 0.03 seconds"))
        bars.see_line(_line("engine bbb", "engine ready: EngineInfo(model='/m')"))
        assert _shown(bars, "load") == (2, 2, "2 of 2")
        assert _shown(bars, "warm-up") == (1, 2, "1 of 2")
    assert _shown(bars, "warm-up") == (2, 2, "2 of 2")
    assert "3 of 3" in console.file.getvalue()  # type: ignore[attr-defined]


def test_the_bars_of_a_failed_start_stay_where_they_were() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=100)
    bars = StartBars(console)
    bars.__enter__()
    bars.see_details(_details(1))
    bars.__exit__(RuntimeError, RuntimeError(), None)
    assert _shown(bars, "warm-up")[0] == 0
