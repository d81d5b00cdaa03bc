"""What an engine says while it starts, and who shows it."""

from __future__ import annotations

import io
import logging
import re
import subprocess
import sys
from collections.abc import Iterator

import pytest

from engine.config import EngineConfig
from engine.engine import Engine
from engine.errors import ConfigError
from engine.observability.logs import LEVEL_VARIABLE, forward_logs, show_logs
from tests.engine.conftest import SavedModel

START = (
    "Initializing an engine with config: model='.*', dtype='bfloat16', .*max_model_len=64, "
    ".*enable_prefix_caching=True,.*tensor_parallel_size=1,",
    "Using cpu attention backend on cpu, with blocks of 8 tokens .the fastest for bfloat16 here.",
    r"Loading weights took \d+\.\d\d seconds",
    r"Model loading took 0\.00 GiB and \d+\.\d\d seconds",
    r"swap_space_gib is not set: 0\.00 GiB of host memory, taken little by little ahead of its use",
    r"CPU KV cache size: 160 tokens in bfloat16, 20 blocks of 8 in 0\.00 GiB",
    r"Host memory for preempted requests and evicted prefixes: 80 blocks, 0 pages of windows and 0 states in 0\.00 GiB",
    r"Maximum concurrency for 64 tokens per request: 2\.50x",
    r"init engine took \d+\.\d\d seconds",
)


def test_a_start_says_what_is_loaded_how_long_it_takes_and_what_fits(
    qwen3: SavedModel, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="engine")
    options = {"dtype": "bfloat16", "max_model_len": 64, "num_blocks": 20, "block_size": 8, "device": "cpu"}
    Engine.from_config(EngineConfig.from_options(qwen3.path, options)).close()
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == len(START)
    for line, pattern in zip(lines, START, strict=True):
        assert re.match(pattern, line), line


def test_a_kv_cache_that_is_smaller_than_the_context_gets_a_warning(
    qwen3: SavedModel, caplog: pytest.LogCaptureFixture
) -> None:
    options = {"max_model_len": 64, "num_blocks": 5, "block_size": 8, "device": "cpu"}
    Engine.from_config(EngineConfig.from_options(qwen3.path, options)).close()
    (warning,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert "the context of 64 tokens: a prompt and its answer have at most 40" in warning


@pytest.fixture
def root(monkeypatch: pytest.MonkeyPatch) -> Iterator[logging.Logger]:
    """A root logger without handlers, as a new interpreter has it; pytest puts some on the real one."""
    root = logging.RootLogger(logging.WARNING)
    monkeypatch.delenv(LEVEL_VARIABLE, raising=False)
    for name in ("engine", "kernels"):
        monkeypatch.setattr(logging.getLogger(name), "parent", root)
    yield root
    for name in ("engine", "kernels"):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [], True
        logger.setLevel(logging.NOTSET)


def shown(level: int = logging.INFO) -> str:
    """Return what becomes of a message."""
    stream = io.StringIO()
    show_logs(stream)
    logging.getLogger("engine.scheduling.scheduler").log(level, "something %s", "happened")
    return stream.getvalue()


@pytest.mark.usefixtures("root")
def test_without_any_configuration_messages_are_shown_with_level_time_and_place() -> None:
    assert re.fullmatch(r"INFO \d\d-\d\d \d\d:\d\d:\d\d \[test_logs\.py:\d+\] something happened\n", shown())
    assert shown(logging.DEBUG) == ""


@pytest.mark.usefixtures("root")
def test_a_second_engine_shows_nothing_twice() -> None:
    stream = io.StringIO()
    show_logs(stream)
    assert shown() == ""
    assert stream.getvalue().count("something happened") == 1


@pytest.mark.usefixtures("root")
@pytest.mark.parametrize("name", ["root", "engine"])
def test_a_program_that_configured_logging_keeps_its_own(name: str, root: logging.Logger) -> None:
    own = io.StringIO()
    (root if name == "root" else logging.getLogger(name)).addHandler(logging.StreamHandler(own))
    assert shown(logging.WARNING) == ""
    assert own.getvalue() == "something happened\n"


@pytest.mark.usefixtures("root")
@pytest.mark.parametrize(
    ("value", "level", "is_shown"),
    [("debug", logging.DEBUG, True), ("WARNING", logging.INFO, False), ("OFF", logging.INFO, False)],
)
def test_the_level_comes_from_the_environment(
    value: str, level: int, is_shown: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(LEVEL_VARIABLE, value)
    assert bool(shown(level)) == is_shown


@pytest.mark.usefixtures("root")
def test_a_level_that_is_none_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LEVEL_VARIABLE, "loud")
    with pytest.raises(ConfigError, match="PAGODA_LOGGING_LEVEL='LOUD' is unknown; choose one of DEBUG"):
        show_logs()


@pytest.mark.usefixtures("root")
def test_messages_can_go_to_another_logger_whose_handlers_come_later() -> None:
    target, stream = logging.getLogger(__name__), io.StringIO()
    target.setLevel(logging.INFO)
    forward_logs(target)
    target.handlers = [logging.StreamHandler(stream)]
    logging.getLogger("kernels.attention").info("chosen")
    assert stream.getvalue() == "chosen\n"
    target.setLevel(logging.WARNING)
    logging.getLogger("kernels.attention").info("chosen again")
    assert stream.getvalue() == "chosen\n"


def test_a_script_sees_the_start_on_stderr_without_configuring_anything(qwen3: SavedModel) -> None:
    options = {"device": "cpu", "num_blocks": 8, "max_model_len": 64, "skip_tokenizer_init": True}
    script = f"from engine.llm import LLM; LLM({qwen3.path!r}, **{options})"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=120)
    assert run.stdout == ""
    lines = run.stderr.splitlines()
    assert all(line.startswith("INFO ") for line in lines)
    assert "init engine took" in lines[-1]
