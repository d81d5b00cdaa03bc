"""The router: simulations of the production policy beside other systems' policies, and measurements of real routing.

Knows replicas as queues with caches, and traces of requests; knows nothing of models, since a replica's speed is a
parameter.
"""
