"""Measures handoffs beside bare NIXL, on real agents: the command ``kvbus bench``.

Refuses to judge a machine: a missed target is a figure, only a failed handoff is an error.
"""
