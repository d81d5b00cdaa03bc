"""`pagoda serve` and `pagoda config check`: a config file from a model and options, what it starts, and its start."""
