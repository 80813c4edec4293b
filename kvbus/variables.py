"""Environment variables of engines and commands.

An agent ignores the variables below, as it may share a shell or pod with an engine.
"""

from enum import StrEnum

PREFIX = "KVBUS_"


class Variable(StrEnum):
    ATTACH = "KVBUS_ATTACH"
    ENGINE_ID = "KVBUS_ENGINE_ID"
    MODEL = "KVBUS_MODEL"
    PARK = "KVBUS_PARK"
    ROLE = "KVBUS_ROLE"
    SERVER_KEY = "KVBUS_SERVER_KEY"
