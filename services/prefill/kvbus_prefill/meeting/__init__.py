"""Offers that are known by a name before they are made: one state machine for each name (pure)."""
