"""The JSON files of a checkpoint, before shapes are read: config.json, generation_config.json, those of the tokenizer.

Knows how they are written, also in a GGUF file, which part of a multimodal config is read, and the format of weights.
"""
