"""Checkpoint files to tensors: headers, quantised formats, reading ahead, ranks' shards, errors that name a tensor.

Knows files, tensors and ranks. Does not know what a layer computes.
"""
