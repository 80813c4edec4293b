"""Benchmark of handoffs against bare NIXL, on real agents: the command ``kvbus bench``."""
