"""Handoffs between real agents, with NIXL, libzmq and the kernel."""
