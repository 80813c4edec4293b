"""Whose keys are trusted, and what each may ask: key files, the folder of public keys, roles.

Refuses to know sockets: `kvbus.bus` has the keys, agents and commands bring the two together.
"""

from kvbus.keys.files import TrustedKey, read_secret, write_secret, write_trusted
from kvbus.keys.trusted import TrustedKeys
from kvbus.protocol.message import Role

__all__ = [
    "Role",
    "TrustedKey",
    "TrustedKeys",
    "read_secret",
    "write_secret",
    "write_trusted",
]
