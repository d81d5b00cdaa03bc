"""The web page: its files, and the live data that it polls.

Knows JSON and static files. Does not know how requests are served.
"""
