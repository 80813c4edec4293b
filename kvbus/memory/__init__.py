"""Memory that an engine shares with its agent."""
