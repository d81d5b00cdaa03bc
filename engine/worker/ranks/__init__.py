"""The ranks of a tensor-parallel engine as processes: how they start, are called, and end together.

Knows processes and sockets, on one host or on several. Does not know models or steps.
"""
