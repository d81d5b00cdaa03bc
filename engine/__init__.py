"""The engine: sequences, blocks, models and sampling. It knows no Ray and no HTTP."""
