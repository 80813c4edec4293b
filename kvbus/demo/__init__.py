"""A small transformer with a paged KV cache, and two engines of it that hand requests off.

Refuses to know more of kvbus than engines do: the SDK, and what a router asks of agents.
"""
