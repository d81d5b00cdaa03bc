"""Mixture of experts in Triton: routing and grouping of tokens, and grouped matrix products."""
