"""CUDA graphs of decode steps: one graph for each of a few batch sizes, replayed instead of launching kernel by kernel.

Knows a step's plan and its static inputs. Does not know the model: it captures any function that computes a step.
"""
