"""What the way from the engine to the client costs: the real server around an engine that computes nothing.

Everything but the runner is the shipped code: ingress, channel, replica, scheduler and block manager.
"""

__all__ = ["IMPORT_PATH"]

IMPORT_PATH = "benchmarks.front.application:build_app"  # for Serve's config
