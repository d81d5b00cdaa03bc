"""Pages of the KV cache from one engine replica to another, over TCP: a server in each replica, and a client.

It knows sockets, messages, checksums and the rates of peers. It does not know which replica holds a prefix, nor how an
engine keeps its pages.
"""
