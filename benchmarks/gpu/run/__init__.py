"""How parts are run: each in a process of its own, within a limit, and the document of all results."""
