"""What hangs on the chain of blocks: the pages of sliding windows, and the states of recurrent layers.

Knows which blocks have a page or a snapshot, and which of them a sequence holds. Does not know hashes or tensors.
"""
