"""Batches without /v1/batches, for `pagoda batch`: with an engine of its own or a server.

Knows files of results. Does not know the command line.
"""
