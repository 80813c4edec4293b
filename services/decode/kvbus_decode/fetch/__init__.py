"""Fetches: one state machine for all of them (pure)."""
