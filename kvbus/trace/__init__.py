"""One request over all agents, on one clock."""
