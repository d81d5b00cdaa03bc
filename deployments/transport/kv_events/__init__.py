"""KV events and load reports from engine replicas to ingresses, over ZeroMQ PUB/SUB.

Knows messages, sockets and sequence numbers. Does not know what a routing decision does with them.
"""
