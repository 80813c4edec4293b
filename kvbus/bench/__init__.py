"""Benchmark of handoffs against bare NIXL, on real agents: ``kvbus bench``."""
