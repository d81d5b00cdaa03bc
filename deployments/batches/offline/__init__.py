"""Batches without /v1/batches: `python -m deployments.batches.offline`, with an engine of its own or a server."""
