"""The embedded demo model: the text it is trained on, the program that trains it, and its evaluation.

Knows torch and transformers; knows nothing of the engine or of the server that serve the model.
"""
