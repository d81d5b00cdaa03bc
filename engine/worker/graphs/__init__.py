"""CUDA graphs of small steps: one for each of a few shapes of batches, replayed instead of launching kernel by kernel.

Knows a step's plan and its static inputs. Does not know the model: it captures any function that computes a step.
"""
