"""A small transformer with a paged KV cache, and two engines of it that hand requests off.

    command, options      the command line, and the run that it describes (no torch)
    run, report           one run, what came of it and how it is shown
    processes, router     the driver: four processes, and the way of each request through them
    messages              what driver and engines tell each other
    engine                what both engines are: a model, an engine of kvbus.lab with its cache
    prefill_engine, decode_engine   the two programs
    model, model_config, weights, paged_cache   the transformer, its cache, its generation

Refuses to know more of kvbus than engines do: the SDK, and what a router asks of agents.
"""
