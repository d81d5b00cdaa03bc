"""What Ray Serve runs or calls: autoscaling, request router, HTTP server, broadcasts, processes, shares of GPUs.

Knows Ray Serve's interfaces. Does not know the OpenAI API or engines.
"""
