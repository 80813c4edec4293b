"""The wire protocol: messages, codec and ticket (no I/O)."""
# ruff: noqa: F403  the files are the list

from kvbus.protocol.attach import *
from kvbus.protocol.commit_cell import *
from kvbus.protocol.engine import *
from kvbus.protocol.envelope import *
from kvbus.protocol.message import *
from kvbus.protocol.peer import *
from kvbus.protocol.ticket import *
from kvbus.protocol.tools import *
