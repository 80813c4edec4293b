"""A small transformer with a paged KV cache, and two engines of it that hand requests off.

    options      the command line, the prompts, and the engines that they describe (no torch), and
                 what the two sides, and they and their engines, tell each other
    run, report  the commands: processes, both sides of the handoffs, what came of them
    engine       the program of both engines
    model        the transformer, its paged cache, its generation

It knows of kvbus what engines know, the SDK, and what a router asks of agents.
"""
