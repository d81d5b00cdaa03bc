"""Everything that knows Ray Serve or HTTP. See app.py for the entry point."""
