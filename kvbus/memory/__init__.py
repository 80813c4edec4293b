"""Memory that an engine shares with its agent. Only ``cuda`` imports torch: import it by name."""
