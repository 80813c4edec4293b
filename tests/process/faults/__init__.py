"""Faults of agents, engines and links."""
