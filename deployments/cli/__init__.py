"""The command `pagoda`: what a person types at a terminal, and what the terminal shows.

Knows typer, rich, the launcher and the HTTP API as a client. Does not know how requests are served. Importing it or
showing its help imports neither torch nor Ray: each command imports what it needs when it runs.
"""
