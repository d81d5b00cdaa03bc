"""A GGUF file in one of llama.cpp's quantised types: `PYTHON -m benchmarks.peers.quantise_gguf IN.gguf OUT.gguf TYPE`.

It runs in llama.cpp's virtual environment, and quantises as llama.cpp's own tool does by default.
"""

from __future__ import annotations

import argparse
import ctypes
import sys

TYPES = {"q4_0": 2, "q8_0": 7, "q4_k_m": 15}  # llama_ftype


def main() -> None:
    """Write the file."""
    import llama_cpp

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source")
    parser.add_argument("target")
    parser.add_argument("type", choices=TYPES)
    options = parser.parse_args()
    parameters = llama_cpp.llama_model_quantize_default_params()
    parameters.ftype = TYPES[options.type]
    names = options.source.encode(), options.target.encode()
    if llama_cpp.llama_model_quantize(*names, ctypes.byref(parameters)):
        sys.exit(f"'{options.source}' cannot be quantised")


if __name__ == "__main__":
    main()
