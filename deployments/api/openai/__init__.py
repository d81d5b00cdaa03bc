"""Chat and completions of the OpenAI API: bodies of requests and responses, tools, reasoning and log-probabilities.

Knows which parser an answer needs, and how its events are written. Does not know how text is parsed, nor replicas.
"""
