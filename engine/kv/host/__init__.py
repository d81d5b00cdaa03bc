"""The second tier, in host memory: what they evict, and what swapped sequences have left there.

Knows pages, their names and the copies of a step. Does not know sequences, nor which kind of page a pool has.
"""
