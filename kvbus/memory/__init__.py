"""Memory that an engine shares with its agent: host and GPU memory, the attach socket, copies.

Only ``cuda`` imports torch, which takes seconds: import it by name.
"""
