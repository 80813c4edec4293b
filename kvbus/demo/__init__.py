"""Demo: a small transformer with a paged KV cache, and two engines that hand requests off.

    options      command line, prompts, setup of an engine (no torch)
    run, report  command, processes, results
    engine       the program of both engines
    model        the transformer, its paged cache, its generation

It uses only the SDK.
"""
