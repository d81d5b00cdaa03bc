"""Measuring a running server: starts it, sends it completions as a client, and runs stock load generators against it.

Knows HTTP and the launcher's command line; knows nothing of the engine inside, which is measured through the API only.
"""
