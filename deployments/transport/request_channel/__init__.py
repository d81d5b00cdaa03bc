"""Requests from ingresses to engine replicas and their tokens back, over ZeroMQ: one message a step to each ingress.

It knows requests, outputs, sockets and lost messages. It knows neither HTTP nor how a replica is chosen.
"""
