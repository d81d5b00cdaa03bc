"""The shapes of recurrent layers, read from a config: one kind in each file."""
