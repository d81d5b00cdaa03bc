"""Messages between ingresses and engine replicas, over ZeroMQ: requests and tokens, and KV events.

Knows how block hashes are packed and what a replica reports of its addresses. Its rooms know the messages.
"""
