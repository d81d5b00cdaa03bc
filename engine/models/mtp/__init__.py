"""Layers of multi-token prediction (MTP), which draft tokens for the model whose checkpoint has them.

Knows a layer's config, weights and forward pass. Does not know sequences, nor which tokens are worth drafting.
"""
