"""`pagoda doctor`: each fault of a machine, of a model and of a server is found, and has a remedy."""

from __future__ import annotations

import json
import shutil
import socket
import time
from collections import namedtuple
from pathlib import Path

import pytest

from deployments.cli.client import ServerClient
from deployments.cli.doctor import machine, software
from deployments.cli.doctor.finding import Finding, State, findings_of
from deployments.cli.doctor.model import check_model
from deployments.cli.doctor.server import check_server
from deployments.config import checkout_root
from tests.deployments.cli.fake_server import FakeServer, live
from tests.deployments.cli.terminal import run, unwrapped

DEMO = checkout_root() / "demo/model"
Usage = namedtuple("Usage", "total used free")


def _only(findings: object) -> Finding:
    [finding] = list(findings)  # type: ignore[call-overload]
    return finding


# --- in a terminal ----------------------------------------------------------------------------------------------------


def test_this_machine_with_the_demo_in_a_terminal() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        code, text = run("doctor", "demo", "--port", str(port))
    text = unwrapped(text)
    assert code == 1  # because of the port
    assert f"{port} is taken" in text
    assert f"-> end the process that listens there (ss -ltnp 'sport = :{port}'), or set" in text
    assert "1 to repair before a server works" in text
    for subject in ("Python", "packages", "GPU", "compiler", "memory", "clock", "config.json", "weights", "parsers"):
        assert subject in text
    assert "tool_parser hermes" in text


def test_a_running_server_in_a_terminal(fake: FakeServer) -> None:
    fake.key = "a-key-of-16-characters"
    code, text = run("doctor", fake.url, "--key", fake.key)
    assert code == 0, text
    assert "2048 tokens of context, 100 KV blocks of one engine, 16 tokens each" in unwrapped(text)
    assert "abc12345: 3 running, 1 waiting, 70% of KV blocks in use" in text
    assert "one token after 40 of prompt" in text
    code, text = run("doctor", fake.url)
    assert code == 1
    assert "it needs an API key" in unwrapped(text)
    assert "-> give --key, or set PAGODA_API_KEY" in text


# --- faults of a machine ----------------------------------------------------------------------------------------------


def test_packages_of_other_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = ["ray[serve]==1.0", "no-such-package>=2", "numpy>=2", "nothing-here>=1; sys_platform == 'plan9'"]
    monkeypatch.setattr(software, "_requirements", lambda: wanted)
    wrong, missing = software.check_packages()
    assert wrong.state is missing.state is State.ERROR
    assert wrong.text.startswith("ray ")
    assert wrong.text.endswith(" is not ==1.0")
    assert wrong.remedy.endswith("-m pip install 'ray[serve]==1.0'")
    assert missing.text == "no-such-package is missing (>=2)"


@pytest.mark.parametrize(
    ("text", "state"),
    [("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.10  Release", State.ERROR),
     ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release", State.OK),
     ("unknown", State.WARNING)],
)  # fmt: skip
def test_the_driver(text: str, state: State, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "version").write_text(text)
    monkeypatch.setattr(software, "DRIVER", tmp_path / "version")
    driver, *_ = software.check_gpu()
    assert (driver.subject, driver.state) == ("driver", state)
    assert ("580 or newer" in driver.remedy) == (state is State.ERROR)


@pytest.mark.parametrize(("granted", "state"), [(True, State.OK), (False, State.WARNING)])
def test_a_system_that_refuses_amx(
    granted: bool, state: State, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cpuinfo").write_text("processor\t: 0\nflags\t\t: fma avx2 avx512f avx512_bf16 amx_bf16 amx_tile\n")
    monkeypatch.setattr(machine, "CPUINFO", tmp_path / "cpuinfo")
    monkeypatch.setattr(machine.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(machine, "tiles_granted", lambda: granted)
    *_, last = machine.check_cpu()
    assert (last.subject, last.state) == ("instructions", state)


@pytest.mark.parametrize("compiler", ["no-such-compiler", "false"])
def test_a_compiler_that_does_not_work(compiler: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", compiler)
    finding = _only(machine.check_compiler())
    assert finding.state is State.WARNING
    assert compiler in finding.text
    assert "apt install gcc" in finding.remedy


def test_little_memory_within_a_cgroup(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "available_memory", lambda: 2 * machine.GIB)
    finding = _only(machine.check_memory())
    assert finding.state is State.WARNING
    assert finding.text.startswith("2.0 GiB available")
    assert "the cgroup leaves 2.0" in finding.text


def test_dockers_small_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(64 * 2**20, 0, 64 * 2**20))
    finding = _only(machine.check_shared_memory())
    assert finding.state is State.WARNING
    assert "--shm-size=1g" in finding.remedy


def test_few_open_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine.resource, "getrlimit", lambda which: (1024, 4096))
    finding = list(machine.check_files())[-1]
    assert (finding.subject, finding.state) == ("open files", State.WARNING)
    assert "at most 4096" in finding.text


def test_a_clock_before_the_installation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine.time, "time", lambda: 1e9)
    finding = _only(machine.check_clock())
    assert (finding.state, finding.remedy) == (State.ERROR, "set the clock")


@pytest.mark.parametrize(("hosts", "state"), [("", State.WARNING), ("localhost,127.0.0.1", State.OK), ("*", State.OK)])
def test_a_proxy_of_the_environment(hosts: str, state: State, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.setenv("no_proxy", hosts)
    finding = _only(machine.check_proxies())
    assert finding.state is state
    assert "http_proxy" in finding.text


def test_a_check_that_fails_is_a_warning() -> None:
    def check() -> list[Finding]:
        raise OSError(13, "Permission denied", "/proc/x")

    finding = _only(findings_of([("memory", check)]))
    assert (finding.subject, finding.state) == ("memory", State.WARNING)
    assert "/proc/x" in finding.text


# --- faults of a model ------------------------------------------------------------------------------------------------


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A copy of the demo model."""
    return Path(shutil.copytree(DEMO, tmp_path / "model"))


def _errors(path: Path) -> list[Finding]:
    return [finding for finding in check_model(str(path)) if finding.state is State.ERROR]


def test_a_good_model_has_no_errors(model: Path) -> None:
    assert not _errors(model)


def test_a_model_without_a_tokenizer(model: Path) -> None:
    (model / "tokenizer.json").unlink()
    [error] = _errors(model)
    assert "holds no tokenizer" in error.text
    assert error.remedy.startswith("add one of tokenizer.json")


def test_weights_that_are_cut_off(model: Path) -> None:
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    [error] = _errors(model)
    assert error.subject == "weights"
    assert "model.safetensors" in error.text


def test_weights_of_another_shape(model: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    config["vocab_size"] += 1
    (model / "config.json").write_text(json.dumps(config))
    [error] = _errors(model)
    assert f"config.json says [{config['vocab_size']}, {config['hidden_size']}]" in error.text


def test_a_model_without_a_chat_template(model: Path) -> None:
    (model / "chat_template.jinja").unlink()
    assert not _errors(model)
    [warning] = [finding for finding in check_model(str(model)) if finding.state is State.WARNING]
    assert warning.subject == "chat template"
    assert "args.chat_template" in warning.remedy


# --- faults of a server -----------------------------------------------------------------------------------------------


def _of_server(fake: FakeServer) -> list[Finding]:
    return list(check_server(ServerClient(fake.url)))


def test_a_server_without_an_engine(fake: FakeServer) -> None:
    fake.answers["/health"] = (503, {"error": {"message": "no engine replica is ready"}})
    assert _of_server(fake)[0].state is State.ERROR


def test_a_server_with_another_clock(fake: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    hour_ago = time.time() - 3600
    monkeypatch.setattr("deployments.cli.doctor.server.time", lambda: hour_ago)
    health = _of_server(fake)[0]
    assert health.state is State.WARNING
    assert "differs from this one by 3" in health.text


def test_a_full_kv_cache(fake: FakeServer) -> None:
    full = live()
    full["replicas"][0]["blocks"] = {"free": 1, "cached": 0, "used": 99, "shared": 0}
    fake.answers["/live"] = full
    [warning] = [finding for finding in _of_server(fake) if finding.state is State.WARNING]
    assert "99% of KV blocks" in warning.text
    assert "kv_cache_memory" in warning.remedy


def test_a_server_without_the_page(fake: FakeServer) -> None:
    del fake.answers["/live"]
    assert any("2 unfinished requests" in finding.text for finding in _of_server(fake))


def test_a_server_of_vectors(fake: FakeServer) -> None:
    fake.status = 404
    assert _of_server(fake)[-1].state is State.NOTE
