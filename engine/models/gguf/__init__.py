"""GGUF files, llama.cpp's format: the header, and what it says as a config.json: names of tensors, ends of answers.

Knows llama.cpp's keys, names and layouts, and what transformers calls the same things. Of the tensors it reads only the
factors of RoPE; checkpoint/formats/gguf.py reads the weights at the positions that are found here, and
engine/text/gguf_tokenizer.py makes the tokenizer. Imports no torch.
"""
