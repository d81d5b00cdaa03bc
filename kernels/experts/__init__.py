"""Mixture of experts: routing tokens to experts, and the feed-forward of each expert's tokens.

Knows a layer's hidden states and weights as tensors. Does not know models.
"""
