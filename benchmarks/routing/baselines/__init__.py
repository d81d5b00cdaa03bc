"""The baselines: routing policies of other systems, re-implemented from their descriptions, each with its parameters.

They read the simulated cluster's exact queues and caches, without delay, through one ingress. That flatters the
policies that estimate caches in reality (SGLang, the vLLM production stack, Ray Serve LLM) or learn of them late.
"""
