"""What only real agents, NIXL, libzmq and the kernel can show."""
