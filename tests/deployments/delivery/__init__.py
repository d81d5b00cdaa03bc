"""The way of a token from an engine's step to the client's bytes, in one thread and without a clock.

The channel, the dispatcher and the HTTP response are the shipped ones; the network (network.py), the engine
(scripted_engine.py) and the client (sse_content.py) are the test's.
"""
