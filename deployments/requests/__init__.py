"""One request's way through the engines: attempts, retries, migrations, detokenisation; its log line and its spans.

It knows token ids, text and the failures of replicas. It knows neither HTTP bodies nor how a replica is chosen.
"""
