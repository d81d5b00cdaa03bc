"""What a decoder layer computes between its matrix products and its attention: norms, RoPE, cache writes, activations.

They know tensors, slots and positions, and nothing about models, which pass them their weights.
"""
