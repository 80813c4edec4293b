"""CURVE keys and trust: key files, the file of trusted public keys, and ``kvbus keys``."""
# ruff: noqa: F403  the files are the list

from kvbus.keys.files import *
from kvbus.keys.trusted import *
from kvbus.protocol.message import Role as Role
