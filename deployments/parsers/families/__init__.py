"""A file for each family of output formats: what its models write around reasoning and tool calls.

Each is a generator over a Reader, or a table of such generators; forced.py is for answers that a grammar enforces. Does
not know how its events become response bodies.
"""
