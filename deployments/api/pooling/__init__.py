"""Embeddings and scores: OpenAI's embeddings, vLLM's score, pooling and classify, Cohere's and Jina's rerank.

Texts become token ids, each text is a request to an engine of its own, and vectors become JSON in slices, so that a
request of thousands of texts holds up no other.
"""
