"""One request's way through the engines: retries, migrations, detokenisation, its record, log line and spans.

Knows token ids, text and replicas' failures. Does not know HTTP, nor how a replica is chosen.
"""
