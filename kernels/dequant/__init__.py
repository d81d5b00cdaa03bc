"""Quantised weights to float32, as their formats define it: a file for each kind of code, and what they share.

Functions on tensors of any device; some may overwrite their first argument. The bits are those of
the format's definition, computed in float32; GGUF's are compared with llama.cpp's own package. Knows no checkpoint
and no model; of GGUF files only the numbers of the types, in gguf_types.py, which imports no torch.

Functions with ``out`` may write the numbers there instead, also in bfloat16: on a CPU in C, with the same bits.
"""
