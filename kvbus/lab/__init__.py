"""Tools that play engines of any shape."""
