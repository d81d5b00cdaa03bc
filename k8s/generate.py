"""`python -m k8s.generate [--check]`: writes serve_config.yaml into the RayService manifests.

`spec.serveConfigV2` of each manifest is the shipped file with the differences listed in TARGETS. So a key that is added
to the shipped file reaches the cluster without being copied by hand. HAProxy starts before the application is known, so
its limits also become environment variables of each container that runs it. ``--check`` writes nothing and reports
manifests that are out of date. Nothing else of a manifest is changed.
"""

from __future__ import annotations

import argparse
import re
import sys
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from deployments.config import LimitOptions
from deployments.proxy.limits import ProxyLimits
from engine.errors import ConfigError

__all__ = ["TARGETS", "Target", "generated", "main", "serve_config"]

ROOT = Path(__file__).resolve().parent.parent
SHIPPED = ROOT / "serve_config.yaml"
_WRAPPER = re.compile(r"^(?P<item> *- )\{name: RAY_SERVE_HAPROXY_BINARY_PATH, value: .*\n", re.MULTILINE)
_LIMIT = re.compile(r"^ *- \{name: PAGODA_PROXY_\w+, value: .*\n", re.MULTILINE)
_BLOCK = re.compile(r"^(?P<indent> *)serveConfigV2: \|\n(?:(?P=indent) +\S.*\n|\n)*", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Target:
    """A manifest, and how its Serve config differs from the shipped one.

    Attributes:
        manifest: the RayService's file.
        changes: changed values of the document, by dotted path.
        arguments: changed arguments of build_app, by dotted path.
        dropped: removed arguments, by dotted path; each must exist.
    """

    manifest: Path
    changes: Mapping[str, Any]
    arguments: Mapping[str, Any]
    dropped: tuple[str, ...] = ()


# Other pods must reach the server; the NetworkPolicies restrict which of them.
IN_A_POD = {"http_options.host": "0.0.0.0"}

# What connects is a load balancer, mostly: of the common ones none keeps idle connections for more than a minute.
BEHIND_A_BALANCER = {"limits.keep_alive_timeout_s": 75}

TARGETS = (
    Target(ROOT / "k8s/overlays/cpu-demo/rayservice-cpu.yaml", IN_A_POD, BEHIND_A_BALANCER),
    Target(
        ROOT / "k8s/overlays/gpu/rayservice-gpu.yaml",
        IN_A_POD,
        {
            **BEHIND_A_BALANCER,
            "model": "/models/Qwen3-8B",
            "model_name": "qwen3-8b",
            "replicas.num_engine_replicas": 2,
            "replicas.num_ingress_replicas": 2,
            # An engine and an ingress fit into a worker of 8 cores; the rest is for Ray's own processes and HAProxy.
            "replicas.cpus_per_engine": 4,
            "replicas.cpus_per_ingress": 2,
            # Explicit, because the application may be built before any worker, and thus any GPU, is visible.
            "replicas.gpus_per_engine": 1,
            "engine.device": "cuda",
            # The minimum and maximum number of pods of the worker group.
            "autoscaling.min_replicas": 2,
            "autoscaling.max_replicas": 4,
        },
        dropped=("engine.kv_cache_memory", "engine.max_num_seqs"),  # marked "demo only" in the shipped file
    ),
)


def serve_config(target: Target) -> dict[str, Any]:
    """Return the shipped Serve config with the changes of ``target``.

    Raises:
        ConfigError: a path of the target does not exist in the shipped file.
    """
    document: dict[str, Any] = yaml.safe_load(SHIPPED.read_text(encoding="utf-8"))
    (application,) = document["applications"]
    for path in target.dropped:
        section, key = _find(application["args"], path)
        if key not in section:
            raise ConfigError(f"dropped '{path}' is not in {SHIPPED.name}; take it out of k8s/generate.py")
        del section[key]
    for root, changes in ((document, target.changes), (application["args"], target.arguments)):
        for path, value in changes.items():
            section, key = _find(root, path)
            section[key] = value
    return document


def _find(root: dict[str, Any], path: str) -> tuple[dict[str, Any], str]:
    """Return the mapping that holds the last key of a dotted path, and that key."""
    *sections, key = path.split(".")
    for name in sections:
        if not isinstance(root.get(name), dict):
            raise ConfigError(f"'{path}' has no '{name}' in {SHIPPED.name}; correct it in k8s/generate.py")
        root = root[name]
    return root, key


def generated(target: Target) -> str:
    """Return the manifest with the current Serve config and limits of HAProxy.

    Raises:
        ConfigError: the manifest does not have exactly one `serveConfigV2: |`, or no container runs haproxy.sh.
    """
    document = serve_config(target)
    text = target.manifest.read_text(encoding="utf-8")
    config = yaml.safe_dump(document, sort_keys=False, width=120)
    if len(matches := list(_BLOCK.finditer(text))) != 1:
        raise ConfigError(f"{target.manifest} has {len(matches)} lines 'serveConfigV2: |'; it must have one")
    indent = matches[0]["indent"]
    block = f"{indent}serveConfigV2: |\n" + textwrap.indent(config, indent + "  ")
    text = text[: matches[0].start()] + block + text[matches[0].end() :]
    return _with_limits(text, LimitOptions(**document["applications"][0]["args"]["limits"]).proxy, target.manifest)


def _with_limits(text: str, limits: ProxyLimits, manifest: Path) -> str:
    """Return the manifest with the limits of HAProxy in each container that runs it through haproxy.sh."""

    def append(wrapper: re.Match[str]) -> str:
        items = [f'{wrapper["item"]}{{name: {name}, value: "{value}"}}\n' for name, value in limits.environment.items()]
        return "".join([wrapper[0], *items])

    text, count = _WRAPPER.subn(append, _LIMIT.sub("", text))
    if not count:
        raise ConfigError(f"no container of {manifest} has RAY_SERVE_HAPROXY_BINARY_PATH; name haproxy.sh there")
    return text


def main(arguments: list[str] | None = None) -> int:
    """Write the manifests, or check them; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m k8s.generate", description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a manifest is out of date")
    check: bool = parser.parse_args(arguments).check
    texts = {target.manifest: generated(target) for target in TARGETS}
    stale = [manifest for manifest, text in texts.items() if manifest.read_text(encoding="utf-8") != text]
    for manifest in stale:
        name = manifest.relative_to(ROOT)
        if check:
            print(f"{name} is out of date; run: python -m k8s.generate", file=sys.stderr)
        else:
            manifest.write_text(texts[manifest], encoding="utf-8")
            print(f"wrote {name}")
    if not stale:
        print(f"the RayServices agree with {SHIPPED.name}; nothing to write")
    return int(check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
