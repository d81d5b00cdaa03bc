"""Metrics on their way out: the recorder behind /metrics, Ray's metrics agent, and the periodic log line.

Knows metric definitions and sinks. Does not know what a metric means.
"""
