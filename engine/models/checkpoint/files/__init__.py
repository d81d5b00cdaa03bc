"""The safetensors files of a checkpoint: which are loaded, what their headers say, and how their bytes are read."""
