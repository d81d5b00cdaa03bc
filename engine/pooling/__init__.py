"""Pooling: embeddings and scores of texts, without a KV cache.

Waiting texts are packed into one ragged forward pass of up to ``max_num_batched_tokens`` tokens (continuous batching by
tokens), and each text's hidden states become a vector or a score. It knows token ids, tensors and transformers'
modules; it knows neither text nor HTTP.
"""
