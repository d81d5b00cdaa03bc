"""From logits to tokens: logit filters, draws, log-probabilities.

Knows logits and the parameters of sequences. Does not know where logits come from or what a token means as text.
"""
