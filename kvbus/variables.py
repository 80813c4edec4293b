"""Environment variables of engines and commands. Those of an agent are named after its keys.

An agent ignores the variables listed here, because it may run in the shell or pod of an engine.
"""

from enum import StrEnum

PREFIX = "KVBUS_"


class Variable(StrEnum):
    """Every variable that is not the key of an agent."""

    ATTACH = "KVBUS_ATTACH"
    ENGINE_ID = "KVBUS_ENGINE_ID"
    MODEL = "KVBUS_MODEL"
    ROLE = "KVBUS_ROLE"
    SERVER_KEY = "KVBUS_SERVER_KEY"
