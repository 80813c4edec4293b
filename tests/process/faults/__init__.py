"""What goes wrong, and what the agents make of it."""
