"""Times on a GPU, beside the least that the machine allows, and what they consist of."""
