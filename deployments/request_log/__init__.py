"""What is written about each request: its record, its line in the log, its spans, and their export to OpenTelemetry.

Knows a request's attempts and times. Does not know HTTP bodies, nor how a request is served.
"""
