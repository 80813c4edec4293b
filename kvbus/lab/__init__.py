"""Tools that play engines: an engine of any shape, its process, and a line to it."""
