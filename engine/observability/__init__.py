"""What observes an engine: metrics, load, KV events, log lines.

Knows what each event of the engine means for each report. Does not know where the reports go.
"""
