"""Metrics outside the engine: the recorder, ``GET /metrics``, Ray's metrics agent, and the periodic log line.

Knows metric definitions and how they are exported. Does not know the code that reports them.
"""
