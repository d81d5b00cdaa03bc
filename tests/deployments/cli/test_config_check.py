"""`pagoda config check`: says what a file would start, or names its first mistake."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from deployments.cli.serving.check import check_file, describe
from deployments.config import checkout_root
from deployments.launcher.preflight import check_document, read_document
from engine.errors import ConfigError
from engine.worker import model_shard
from tests.deployments.cli.terminal import run, unwrapped

SHIPPED = checkout_root() / "serve_config.yaml"


def test_the_shipped_file_in_a_terminal() -> None:
    code, text = run("config", "check", str(SHIPPED))
    assert code == 0, text
    text = unwrapped(text)
    assert "pagoda-demo (generate) at http://127.0.0.1:8000/v1, page at http://127.0.0.1:8000/" in text
    assert "2 engines, 1 ingress" in text
    assert "2,048 blocks of 16 = 32,768 tokens in 64.0 MiB: 16.0 requests of full length" in text


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("max_num_seqs: 64 ", "max_num_seq: 64 ", "unknown engine option 'max_num_seq'; did you mean 'max_num_seqs'?"),
        ("port: 8000", "port: 80000", "http_options.port=80000 is not a port; give a number from 1 to 65535"),
        ("max_num_seqs: 64 ", "max_model_len: 4096 ", "max_model_len=4096"),
        ("kv_cache_memory: 64MiB ", "kv_cache_memory: 1KiB ", "raise kv_cache_memory"),
    ],
)
def test_a_mistake_is_named_with_its_remedy(old: str, new: str, message: str, tmp_path: Path) -> None:
    text = SHIPPED.read_text()
    assert old in text
    file = tmp_path / "my.yaml"
    file.write_text(text.replace(old, new).replace("model: demo/model", f"model: {checkout_root()}/demo/model"))
    with pytest.raises(ConfigError, match=rf"^{re.escape(f'{file}: ')}.*{re.escape(message)}"):
        check_file(file)


def test_a_missing_file_in_a_terminal(tmp_path: Path) -> None:
    code, text = run("config", "check", "none.yaml", cwd=tmp_path)
    assert (code, text) == (1, "pagoda: none.yaml cannot be read: No such file or directory\n")


def _facts(**args: object) -> dict[str, str]:
    document = read_document(SHIPPED)
    document["applications"][0]["args"] |= args
    return dict(describe(*check_document(document)))


def test_replicas_for_which_the_machine_has_no_room() -> None:
    facts = _facts(replicas={"num_engine_replicas": 100, "cpus_per_engine": 9})
    assert facts["replicas"].startswith("100 engines")
    assert "wait for room; lower replicas.cpus_per_engine" in facts["CPUs"]


def test_ranks_with_bundles_of_their_own_reserve_cpus_each() -> None:
    replicas = {"num_engine_replicas": 3, "cpus_per_engine": 2, "cpus_per_ingress": 0, "placement_strategy": "PACK"}
    facts = _facts(replicas=replicas, engine={"tensor_parallel_size": 4, "device": "cpu"})
    assert facts["CPUs"] == "Ray reserves 24 of all nodes, 2 for each rank"


@pytest.mark.parametrize(("strategy", "rank"), [("STRICT_PACK", 0), ("SPREAD", None)])
def test_ranks_on_other_nodes_need_no_gpu_here(
    strategy: str, rank: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int | None] = []
    monkeypatch.setattr(model_shard, "resolve_device", lambda _, rank: asked.append(rank) or torch.device("cpu"))
    _facts(replicas={"placement_strategy": strategy}, engine={"tensor_parallel_size": 4})
    assert asked == [rank]


def test_autoscaling_and_a_cache_on_the_host() -> None:
    facts = _facts(autoscaling={"max_replicas": 4, "min_replicas": 0}, engine={"swap_space_gib": 0.5, "num_blocks": 64})
    assert facts["replicas"].endswith("autoscaling from 0 to 4 engines")
    assert facts["host cache"].startswith("512.0 MiB")
    assert facts["KV cache"].startswith("64 blocks of 16 = 1,024 tokens")
    assert "shared cache" not in facts


@pytest.mark.parametrize(("gib", "text"), [(8.5, "at most 8.5 GiB"), (None, "without a limit")])
def test_a_shared_cache(gib: float | None, text: str) -> None:
    options = {"swap_space_gib": 0.5, "shared_cache_path": "s3://bucket/kv", "shared_cache_gib": gib}
    assert _facts(engine=options)["shared cache"] == f"{text} in s3://bucket/kv"


def test_a_file_without_our_application(tmp_path: Path) -> None:
    document = read_document(SHIPPED)
    document["applications"][0]["import_path"] = "another:app"
    with pytest.raises(ConfigError, match="no application has import_path"):
        check_document(document)
