"""The command ``kvbus status``."""
