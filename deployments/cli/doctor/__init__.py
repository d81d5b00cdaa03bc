"""The checks of `pagoda doctor`: this machine, a model's files, a running server.

Each check returns findings, and each finding that is a problem says what to do. Nothing is looked up on the network.
"""
