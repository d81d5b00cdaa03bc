"""What the dashboard shows: one module for each row, with its panels from left to right.

Knows the metrics and their descriptions; knows nothing of Grafana's JSON (panels.py) or of positions (dashboard.py).
"""
