"""The embedded demo model: the text it is trained on, the program that trains it, and its evaluation.

Knows nothing of the engine or the server, except that the evaluation runs the model through the offline LLM.
"""
