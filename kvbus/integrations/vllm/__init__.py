"""vLLM as a client of kvbus: what its connector base class needs, on the SDK alone.

Refuses to patch vLLM, and to run any transfer in its processes.
"""
