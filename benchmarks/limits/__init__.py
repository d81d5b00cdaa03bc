"""What a machine allows at most: measured rates of linears and reading, and the least time of a workload from them.

Knows model shapes and workloads; knows nothing of the engine, except for its packed linears, which are measured too.
"""
