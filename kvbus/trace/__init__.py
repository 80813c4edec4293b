"""The command ``kvbus trace``: one request over all agents, on one clock."""
