"""EAGLE-3 heads, which draft from hidden states of several layers of a model (Li et al., 2025, arXiv 2503.01840).

Knows a head's config, weights and forward pass. Does not know sequences, nor which tokens are worth drafting.
"""
