"""Kernels for CPUs in C (csrc/): the library is compiled on first use and kept; without a compiler torch computes.

This room knows tensors and the C library: every ctypes type is in bindings.py, and the other modules are typed Python
functions and objects. It knows nothing about models, checkpoints or attention backends.
"""
