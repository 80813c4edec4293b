"""The names of the cases, for the command line.

Refuses to import a case: that costs seconds, and ``kvbus --help`` lists this command.
"""

from enum import StrEnum


class CaseName(StrEnum):
    """The cases, in the order in which they are measured."""

    CONTIGUOUS_64M = "contiguous-64m"
    CONTIGUOUS_256M = "contiguous-256m"
    SCATTERED_256K = "scattered-256k"
    SCATTERED_16K = "scattered-16k"
    FIXED = "fixed"
    LOAD = "load"
    IDLE = "idle"
    RATE = "rate"
