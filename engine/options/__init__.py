"""Rules that the values of options must keep, and options that are types of their own.

Knows values and error messages. Does not know which request or file they come from.
"""
