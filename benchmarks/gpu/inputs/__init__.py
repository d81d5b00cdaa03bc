"""What parts check and measure with: random batches, layers, checkpoints, and models whose answers are judged."""
