"""Which sequences compute how many tokens in the next step, and what becomes of what they sampled.

Knows sequences, blocks and budgets. Does not know tensors, models or text, and imports no torch.
"""
