"""The choice of tokens in Triton: kernels, the math they share, and ops.py, which launches them."""
