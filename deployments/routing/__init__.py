"""Which replica serves a prompt: the cost policy, the index of cached blocks, and what replicas report.

Knows hashes, numbers and replica names. Does not know Ray Serve's classes, prompts' text or HTTP.
"""
