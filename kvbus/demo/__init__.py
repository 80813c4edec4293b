"""A small transformer with a paged KV cache, and two engines of it that hand requests off.

    options               the command line, and the engines that it describes (no torch)
    run, report           the driver: four processes, the way of each request, what came of it
    sides                 one engine at an agent that runs already, for two machines
    messages              what driver and engines tell each other
    engine                the program of both engines
    model, paged_cache    the transformer, its cache, its generation

It knows of kvbus what engines know, the SDK, and what a router asks of agents.
"""
