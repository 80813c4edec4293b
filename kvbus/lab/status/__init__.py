"""The command ``kvbus status``: current state of agents, and events of one agent."""
