"""CURVE keys and trust: key files, the file of trusted public keys, and ``kvbus keys``."""

from kvbus.keys.files import read_secret, write_secret
from kvbus.keys.trusted import TrustedKey, TrustedKeys, revoke_trusted, write_trusted
from kvbus.protocol.message import Role

__all__ = [
    "Role",
    "TrustedKey",
    "TrustedKeys",
    "read_secret",
    "revoke_trusted",
    "write_secret",
    "write_trusted",
]
