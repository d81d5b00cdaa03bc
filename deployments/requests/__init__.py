"""One request's way through the engines: dispatch, stalls, retries, migration, detokenisation.

It knows token ids, text and the failures of replicas. It knows neither HTTP bodies nor how a replica is chosen.
"""
