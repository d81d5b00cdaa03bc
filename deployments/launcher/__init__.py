"""Running a server on one machine: checks before the start, the child process with its environment, and its end.

Knows files, ports, processes and Ray's dashboard. Does not know requests or engines.
"""
