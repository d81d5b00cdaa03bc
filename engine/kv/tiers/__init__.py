"""Where KV pages enter and leave the host pools: a disk, or another engine.

All pages pass through the host pool. What leaves is read from pinned host pages (departures.py). What comes is written
to reserved host pages by a background thread, verified, and published under its name (arrivals.py). From there the
prefix cache loads it as what it evicted itself. All bookkeeping happens in the engine's thread; other threads only copy
bytes.

Does not know how a network transfers pages, nor which source a router would choose.
"""
