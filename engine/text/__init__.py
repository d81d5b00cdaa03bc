"""Text on both sides of the engine: tokenizer, chat template, detokenizer, stop strings.

The engine itself processes token ids; only the offline API and the ingress use this room. It imports no torch.
"""
