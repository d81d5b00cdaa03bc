"""Our package shares its import name with a distribution of Hugging Face's; both must work in one environment."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NAMES = (  # what transformers imports from it
    "CUDAProperties",
    "Device",
    "KernelizeFallback",
    "LayerRepository",
    "LocalLayerRepository",
    "Mode",
    "ROCMProperties",
    "register_kernel_mapping",
    "replace_kernel_forward_from_hub",
    "use_kernel_mapping",
    "get_kernel",
    "kernelize",
    "use_kernelized_func",
)


def run(program: str, *path: Path) -> str:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (ROOT, *path)))}
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A site-packages directory with a distribution `kernels` of a version that transformers accepts."""
    from transformers.utils.import_utils import KERNELS_MIN_VERSION

    package, metadata = tmp_path / "kernels", tmp_path / f"kernels-{KERNELS_MIN_VERSION}.dist-info"
    package.mkdir()
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: kernels\nVersion: {KERNELS_MIN_VERSION}\n")
    (package / "layer.py").write_text(
        "".join(f"class {name}:\n    pass\n" for name in NAMES)
        + "def use_kernel_forward_from_hub(name):\n    return lambda cls: cls\n"
        + "def use_kernelized_func(*functions):\n    return lambda cls: cls\n"
    )
    names = ", ".join((*NAMES, "use_kernel_forward_from_hub"))
    (package / "__init__.py").write_text(f"__version__ = {KERNELS_MIN_VERSION!r}\nfrom kernels.layer import {names}\n")
    return tmp_path


@pytest.mark.long
def test_alone_our_package_is_not_taken_for_the_other_one() -> None:
    program = (
        "from transformers.utils.import_utils import is_kernels_available\n"
        "import transformers.models.qwen3.modeling_qwen3, kernels.attention.select\n"
        "print(is_kernels_available(), hasattr(kernels, 'get_kernel'))"
    )
    assert run(program).split() == ["False", "False"]


@pytest.mark.long
def test_both_work_in_one_environment(site: Path) -> None:
    program = (
        "from transformers.utils.import_utils import is_kernels_available\n"
        "import transformers.models.qwen3.modeling_qwen3\n"
        "import kernels, kernels.attention.select, kernels.layer\n"
        "from kernels import get_kernel\n"
        "from kernels.cache.store_kvcache import store_kvcache\n"
        "print(is_kernels_available(), get_kernel is kernels.layer.get_kernel, kernels.__file__)"
    )
    available, same, file = run(program, site).split()
    assert (available, same) == ("True", "True")
    assert Path(file) == ROOT / "kernels" / "__init__.py"
