"""Demo: a small transformer with a paged KV cache, and two engines that hand requests off.

    options      command line, prompts, messages between processes (no torch)
    run, report  commands, processes, results
    engine       the program of both engines
    model        the transformer, its paged cache, its generation

It uses only the SDK, and a router's requests to agents.
"""
