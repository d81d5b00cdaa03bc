"""What the launcher checks before a start and watches afterwards: configuration, processes, log files.

Knows the machine and its processes. Does not know requests or engines.
"""
