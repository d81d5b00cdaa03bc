"""Stored codes and scales of quantised weights to float32: pure functions on tensors, a file for each format.

They import nothing but torch, and know no files and no models.
"""
