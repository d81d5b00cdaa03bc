"""The web page: its files and the live data that they show.

Knows HTTP caching headers and snapshots of engines. Does not know how an engine or the router works.
"""
