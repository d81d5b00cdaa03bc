"""Tensor parallelism: the ranks of one engine, processes of one host that compute each step together."""
