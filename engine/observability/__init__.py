"""What observes an engine: metrics, load, KV events, log lines.

Knows how each event of the engine changes these reports. Does not know where the reports are sent.
"""
