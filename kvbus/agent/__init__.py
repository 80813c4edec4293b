"""What both agents share: the process, the local engines, and the staging slots.

Refuses to know offers or fetches; those are the services' own.
"""
