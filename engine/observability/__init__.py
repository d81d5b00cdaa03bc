"""What an engine reports of itself: metrics, load, log lines.

Knows what each metric means. Does not know where the numbers go.
"""
