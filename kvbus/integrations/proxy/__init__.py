"""A small OpenAI-compatible proxy for trying out disaggregated serving.

Refuses to be a production router: it knows the two-step contract, round-robin, and nothing of load.
"""
