"""Quantised weights to float32, as their formats define it: one file for each kind of code.

Pure functions on tensors of any device, which give the bits of the format's own library. Knows no file and no model.
"""
