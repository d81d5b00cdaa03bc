"""The Responses API of OpenAI: POST /v1/responses, its stream of events, and the responses that are kept.

Knows how a request becomes a chat request, and its answer output items. Does not know how answers are generated.
"""
