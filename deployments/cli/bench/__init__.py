"""`pagoda bench`: load on a running server of the OpenAI API, and what its clients see.

Knows HTTP, JSON and asyncio. It costs a few microseconds a token, so that it may share a machine with the server. The
benchmarks of the checkout use its parts: the ids of generated prompts, and the reader of traces.
"""
