"""The shapes of layers, read from a config: one kind of layer, or of its parts, in each file."""
