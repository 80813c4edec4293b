"""The base of the sans-IO state machines, for offers, fetches, slots and reads."""
