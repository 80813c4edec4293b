"""Whose keys are trusted, and what each may ask: key files, the folder of public keys, roles.

Refuses to know sockets: `kvbus.bus` has the keys, agents and commands bring the two together.
"""
