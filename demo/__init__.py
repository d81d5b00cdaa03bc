"""The embedded demo model: the text it was trained on, and the program that trained it."""
