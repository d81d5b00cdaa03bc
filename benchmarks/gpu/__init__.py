"""What only a GPU can show: kernels against references, tokens against transformers, throughput against the limit."""
