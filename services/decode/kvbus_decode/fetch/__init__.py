"""The state machine of all fetches (sans-IO)."""
