"""What is known of each architecture: how its config and checkpoint differ, who computes it, or why it is refused."""
