"""Endpoints around generation, in vLLM's shapes, and about the server: health, load, configuration, metrics, schema.

It knows the bodies of the OpenAI API, the tokenizer and the configuration. It does not know how replicas are called.
"""
