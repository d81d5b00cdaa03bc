"""Everything that touches the device below torch's own operators: KV cache writes, attention, C kernels for CPUs.

These modules know tensors, slots and block tables. They know nothing about models, sequences, schedulers or requests.
cgroup.py and home.py say what the machine gives a process: CPUs, memory and a directory of its own.
Importing them imports neither Triton nor flash-attn; a backend imports its own library when it is first used. The table
of attention backends does not need torch either, so this file imports nothing of ours.

Hugging Face has a distribution that is called `kernels` too, which transformers imports from when it is installed. So
that both work in one environment, with ours first on the path, this package also finds that one's modules and names.
"""

from functools import cache
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from pkgutil import extend_path
from types import ModuleType

__path__ = extend_path(__path__, __name__)


def __getattr__(name: str) -> object:
    """Look up what is not ours in the distribution of the same name."""
    namesake = _namesake() if name == "__version__" or not name.startswith("__") else None
    if namesake is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(namesake, name)
    return value


@cache
def _namesake() -> ModuleType | None:
    """Run the `__init__.py` of the other distribution once, under a name of its own; its imports meet our path."""
    for folder in __path__:
        file = Path(folder) / "__init__.py"
        if file.is_file() and not file.samefile(__file__):
            spec = spec_from_file_location("kernels_namesake", file)
            assert spec is not None
            assert spec.loader is not None
            module = module_from_spec(spec)
            spec.loader.exec_module(module)
            return module
    return None
