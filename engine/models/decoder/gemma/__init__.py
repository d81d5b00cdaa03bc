"""Parts of Gemma 3n and 4: layers' own inputs, several residual streams, and a branch beside attention."""
