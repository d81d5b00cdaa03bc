"""The second tier of the device's pools, in host memory: what those evict, and what swapped sequences leave there.

Knows pages, their names and the copies of a step. Does not know sequences, nor which kind of page a pool has.
"""
