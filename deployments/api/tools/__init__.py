"""Tool calls and reasoning of chat completions: fields of requests, the grammar of forced calls, response bodies.

Knows the OpenAI API and which parser an answer needs. Does not know how text is parsed, nor replicas.
"""
