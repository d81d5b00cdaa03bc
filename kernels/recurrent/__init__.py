"""Recurrent layers: convolutions, the gated delta rule and selective state spaces, over a pool of states.

They know tensors, slots of states and where sequences begin, and nothing about models, which pass them their weights.
"""
