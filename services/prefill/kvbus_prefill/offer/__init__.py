"""The state machine of all offers and leases (sans-IO)."""
