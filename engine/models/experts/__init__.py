"""Mixture of experts: its shape, its weights in a checkpoint, and torch's module. Knows only a layer's feed-forward."""
