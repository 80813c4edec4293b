"""The process of an agent: its command, configuration, logs, metrics, start and end."""
