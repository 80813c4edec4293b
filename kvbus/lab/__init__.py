"""What tools that play engines share: an engine of any shape, its process, a line to it."""
