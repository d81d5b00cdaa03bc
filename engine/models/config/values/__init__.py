"""Single values of a config: the limits of plausible ones, the share of a rank, and rounding to a dtype."""
