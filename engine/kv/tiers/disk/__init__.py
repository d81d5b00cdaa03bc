"""The disk cache: KV pages in a file of fixed slots, which a restarted engine finds again.

Knows slots, digests and threads. Trusts no byte that it reads: each slot says what it holds, and has checksums.
"""
