"""What the routing policy is worth, and what a decision costs."""
