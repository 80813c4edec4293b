"""The command ``kvbus plan``: what a handoff would read from whom, and how long it would take.

Refuses to start an agent or to allocate KV memory: engines are specs here, addresses pretended.
"""
