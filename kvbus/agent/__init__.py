"""What both agents share: config, logs, metrics, deadlines, and the local engines they serve.

Refuses to know offers or fetches; those are the services' own.
"""
