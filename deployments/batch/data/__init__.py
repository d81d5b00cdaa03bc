"""Batches as a Ray Data job: JSONL or Parquet from anywhere to anywhere, with engines on the nodes of a Ray cluster.

Knows Ray Data. What a line is, and how it is answered, is that of the other batches.
"""
