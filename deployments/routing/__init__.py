"""Routing: which engine replica gets a prompt, by the KV blocks it has cached and the work it has queued.

    ClusterView                 the replicas listed by Serve; chooses one for a Dispatch, and counts it in its load
      +-- RoutingState          applies KV events and load reports; owns the lock
      |     +-- KVIndex         which replica holds which blocks; of one prompt: HeldBlocks
      |     +-- StateIndex      after which of them a hit may resume, where a model has states
      |     +-- StorageIndex    which blocks it can read from its disk, and from the shared cache
      |     +-- ReplicaTable    how busy each replica is, as the cost of an empty prompt (cost.py)
      |           +-- CostRows      the same as arrays, for decisions
      |           +-- SourceRates   how fast it fetches KV from storage and from each peer
      +-- SourceFinder          from where replicas can fetch the beginning of this prompt
      +-- RoutingPolicy         cost of this prompt on each replica, fetches included (fetches.py)
      +-- RecentlyRouted        the last routed requests, for the web page

Knows block hashes, loads and replica names. Does not know Ray Serve, prompt text or HTTP.
"""
