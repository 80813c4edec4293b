"""Data process of an agent."""
