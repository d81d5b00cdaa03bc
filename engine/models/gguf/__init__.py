"""GGUF files, llama.cpp's format: the header, the config and the tensor names that it stands for, its tokenizer's data.

Knows llama.cpp's keys, names and layouts, and what transformers calls the same things. It reads no weights (the room
checkpoint/ does, with the positions that are found here) and imports no torch.
"""
