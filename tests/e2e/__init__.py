"""Whole handoffs between engines and agents."""
