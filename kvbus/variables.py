"""Environment variables of engines and commands; those of an agent are named after its keys.

An agent ignores the variables below, as it may share a shell or pod with an engine.
"""

from enum import StrEnum

PREFIX = "KVBUS_"


class Variable(StrEnum):
    """All variables except the keys of an agent."""

    ATTACH = "KVBUS_ATTACH"
    ENGINE_ID = "KVBUS_ENGINE_ID"
    MODEL = "KVBUS_MODEL"
    ROLE = "KVBUS_ROLE"
    SERVER_KEY = "KVBUS_SERVER_KEY"
