"""What engines publish to ingresses: KV events and load reports, as messages on ZeroMQ sockets.

Knows bytes, sockets and sequence numbers. Does not know what the router does with a message.
"""
