"""Measures handoffs beside bare NIXL, on real agents: the command ``kvbus bench``."""
