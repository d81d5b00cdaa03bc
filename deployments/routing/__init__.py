"""Routing: which engine replica gets a prompt, by the KV blocks it has cached and the work it has queued.

    PrefixRouter (router.py)      called by Ray Serve for each request
      +-- ClusterView             the replicas listed by Serve, and where each request of this process runs
            +-- RoutingState      takes the lock; applies KV events, load reports and dispatches
                  +-- KVIndex         which replica holds which blocks
                  +-- ReplicaTable    how busy each replica is, as the cost of an empty prompt (cost.py)
                  +-- RoutingPolicy   cost of this prompt on each replica -> ranking

Knows block hashes, loads and replica names. Does not know Ray Serve, prompt text or HTTP.
"""
