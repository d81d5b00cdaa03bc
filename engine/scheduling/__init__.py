"""Chooses which sequences compute how many tokens in the next step, and updates them with what the step sampled.

Knows sequences, blocks and budgets. Does not know tensors, models or text, and imports no torch.
"""
