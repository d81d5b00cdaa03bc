"""Routing: which engine replica gets a prompt, by the KV blocks it has cached and the work it has queued.

Knows block hashes, loads and replica names. Does not know Ray Serve, prompt text or HTTP.
"""
