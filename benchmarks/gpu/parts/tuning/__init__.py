"""Parts that time kernels with other sizes than those that they have."""
