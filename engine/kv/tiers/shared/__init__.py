"""The shared cache: KV pages on storage that several engines use, a directory or an object store, through fsspec.

Knows names of objects and their ages. Trusts no byte that it reads: each object says what it holds, and has checksums.
"""
