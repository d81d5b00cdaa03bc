"""Speculative decoding: which sequences get draft tokens, who proposes them, and which of them are accepted.

Knows sequences and their tokens. Does not know tensors or how a token is sampled, and imports no torch.
"""
