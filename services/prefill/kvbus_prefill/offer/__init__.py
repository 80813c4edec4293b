"""State machine of offers, their leases, and the names that readers await them by (pure)."""
