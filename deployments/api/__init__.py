"""The HTTP surface: request bodies, prompts, sampling parameters, response bodies and server-sent events.

Knows the OpenAI API and HTTP. Does not know which replica serves a request, nor what an engine does with it.
"""
