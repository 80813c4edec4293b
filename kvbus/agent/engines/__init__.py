"""The local engines of an agent: their processes and their memory."""
