"""Endpoints around generation, in vLLM's shapes: /tokenize, /detokenize, /load, /server_info, /invocations, the schema.

It knows the bodies of the OpenAI API, the tokenizer and the configuration. It does not know engines or replicas.
"""
