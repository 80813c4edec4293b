"""The base of the sans-IO state machines."""
