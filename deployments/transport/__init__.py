"""Messages between ingresses and engine replicas, over ZeroMQ, and pages of the KV cache between replicas, over TCP.

Knows how block hashes are packed and what a replica reports of its addresses. Its rooms know the messages.
"""
