"""Programs that measure Pagoda; `benchmarks/README.md` lists them, and quoted results are kept in results/ as JSON.

A module here is a command (`python -m benchmarks.NAME`) or a helper that several commands share. The rooms are peers
(other engines), limits (what the machine allows), serving (a server and its clients), kv_memory, gpu and routing.
Nothing that runs in production imports this package.
"""
