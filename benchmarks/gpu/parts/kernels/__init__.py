"""Parts that check or time kernels: against references, in graphs, beside the bandwidth of memory."""
