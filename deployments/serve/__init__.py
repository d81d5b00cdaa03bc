"""What Ray Serve runs or calls: autoscaling policy, request router, HTTP server, broadcasts, the priority of processes.

Knows Ray Serve's interfaces. Does not know the OpenAI API or engines.
"""
