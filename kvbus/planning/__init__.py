"""Read plans: which rank reads which bytes from which rank, and on which path.

Addresses are numbers here.
"""
# ruff: noqa: F403  the files are the list

from kvbus.planning.boxes import *
from kvbus.planning.choose import *
from kvbus.planning.mapping import *
from kvbus.planning.run_plan import *
from kvbus.planning.runs import *
from kvbus.planning.spans import *
from kvbus.planning.staged import *
