"""Staging slots and who may have them: one state machine for each device (pure)."""
