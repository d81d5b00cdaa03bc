"""One family of output formats a file: what its models write around reasoning and tool calls.

Each is a generator over a Reader. Does not know how its events become response bodies.
"""
