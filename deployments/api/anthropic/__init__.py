"""The Messages API, as Anthropic defines it: request bodies, their translation to chat requests, responses and events.

Knows chat requests and the events of parsers. Does not know templates, replicas or engines.
"""
