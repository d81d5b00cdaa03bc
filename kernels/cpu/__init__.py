"""Kernels for CPUs, in C: compiled on first use, kept, and done without where there is no compiler."""
