"""Models: reading a checkpoint's description and weights, and the decoder that computes it."""
