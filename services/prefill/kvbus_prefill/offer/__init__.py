"""Offers and the leases on them: one state machine for all of them (pure)."""
