"""Runners of other engines, each for a virtual environment of its own, and the protocol that all runners share.

Knows workloads and the peers' public APIs; imports neither Pagoda's engine nor anything beyond the standard library at
the top of a module.
"""
