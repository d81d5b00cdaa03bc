"""k8s/generate.py: the manifests hold serve_config.yaml with the differences in TARGETS."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from engine.errors import ConfigError
from k8s import generate
from k8s.generate import SHIPPED, TARGETS, Target, generated, main, serve_config


def test_the_manifests_are_up_to_date() -> None:
    assert main(["--check"]) == 0


def test_a_run_that_writes_nothing_says_so(target: Target, capsys: pytest.CaptureFixture[str]) -> None:
    before = target.manifest.read_text()
    for arguments in ([], ["--check"]):
        assert main(arguments) == 0
        assert capsys.readouterr().out == "the RayServices agree with serve_config.yaml; nothing to write\n"
    assert target.manifest.read_text() == before
    target.manifest.write_text(before.replace("port: 8000", "port: 8001"))
    assert main([]) == 0
    assert capsys.readouterr().out == "wrote rayservice.yaml\n"


@pytest.fixture
def target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Target:
    """Return the GPU target with a copy of its manifest."""
    copy = replace(TARGETS[1], manifest=tmp_path / "rayservice.yaml")
    copy.manifest.write_text(TARGETS[1].manifest.read_text())
    monkeypatch.setattr(generate, "TARGETS", (copy,))
    monkeypatch.setattr(generate, "ROOT", tmp_path)
    return copy


def test_a_key_that_is_added_to_the_shipped_file_reaches_the_manifest(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shipped = yaml.safe_load(SHIPPED.read_text())
    shipped["applications"][0]["args"]["web"] = {"title": "a: b", "lines": ["one", "", "two"]}
    added = tmp_path / "serve_config.yaml"
    added.write_text(yaml.safe_dump(shipped))
    monkeypatch.setattr(generate, "SHIPPED", added)
    before = target.manifest.read_text()
    assert main(["--check"]) == 1
    assert "rayservice.yaml is out of date; run: python -m k8s.generate" in capsys.readouterr().err
    assert target.manifest.read_text() == before
    assert main([]) == 0
    assert main(["--check"]) == 0
    spec = yaml.safe_load(target.manifest.read_text())["spec"]
    held = yaml.safe_load(spec.pop("serveConfigV2"))
    assert held["applications"][0]["args"]["web"] == shipped["applications"][0]["args"]["web"]
    old = yaml.safe_load(before)["spec"]
    del old["serveConfigV2"]
    assert spec == old


def test_only_what_is_listed_differs() -> None:
    shipped = yaml.safe_load(SHIPPED.read_text())
    for item in TARGETS:
        generated = serve_config(item)
        for root, paths in ((generated, item.changes), (generated["applications"][0]["args"], item.arguments)):
            original = shipped if root is generated else shipped["applications"][0]["args"]
            for path in [*paths, *(item.dropped if root is not generated else ())]:
                *sections, key = path.split(".")
                ours, theirs = root, original
                for name in sections:
                    ours, theirs = ours[name], theirs.setdefault(name, {})
                ours.pop(key, None)
                theirs.pop(key, None)
        assert generated == shipped
        shipped = yaml.safe_load(SHIPPED.read_text())


def test_a_path_that_does_not_exist_is_named(target: Target) -> None:
    with pytest.raises(ConfigError, match=r"dropped 'engine\.kv_memory' is not in serve_config\.yaml"):
        serve_config(replace(target, dropped=("engine.kv_memory",)))
    with pytest.raises(ConfigError, match=r"'scaling\.max' has no 'scaling'"):
        serve_config(replace(target, arguments={"scaling.max": 1}))


@pytest.mark.parametrize("text", ["spec: {}\n", "a:\n  serveConfigV2: |\n    x\nb:\n  serveConfigV2: |\n    y\n"])
def test_a_manifest_without_exactly_one_serve_config_is_rejected(target: Target, text: str) -> None:
    target.manifest.write_text(text)
    with pytest.raises(ConfigError, match=r"it must have one"):
        generated(target)


def test_a_changed_limit_of_haproxy_reaches_every_container_that_runs_it(target: Target) -> None:
    before = target.manifest.read_text()
    text = generated(replace(target, arguments={**target.arguments, "limits.max_connections": 77}))
    lines = zip(before.splitlines(), text.splitlines(), strict=True)
    changed = [new.strip() for old, new in lines if old != new]
    variable = '- {name: PAGODA_PROXY_MAX_CONNECTIONS, value: "77"}'
    assert changed == ["max_connections: 77", variable, variable]
    yaml.safe_load(text)


def test_a_manifest_without_our_haproxy_is_rejected(target: Target) -> None:
    text = target.manifest.read_text()
    target.manifest.write_text(text.replace("RAY_SERVE_HAPROXY_BINARY_PATH", "OTHER"))
    with pytest.raises(ConfigError, match=r"no container of .* has RAY_SERVE_HAPROXY_BINARY_PATH"):
        generated(target)
