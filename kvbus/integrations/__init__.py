"""Real engines as clients of kvbus, and what routes requests between them.

Refuses anything but the SDK: what an engine's connector does, an engine of anybody else can do.
"""
