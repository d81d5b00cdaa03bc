"""Parsers of a model's answer: text in, events out (content, reasoning, tool calls), the same however it is cut.

Knows the formats in which models write tool calls and reasoning. Does not know HTTP or engines. The ids of tokens
concern reasoning_tokens.py alone, which counts the tokens of reasoning.
"""
