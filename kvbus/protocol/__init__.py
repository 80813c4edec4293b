"""Messages, their codec and the ticket: what agents, engines, routers and tools say (pure).

All of it is here, so that tests name one module; the product imports from the files. A third of
their lines are the text of the protocol pages.
"""
# ruff: noqa: F403  the files are the list

from kvbus.protocol.attach import *
from kvbus.protocol.engine import *
from kvbus.protocol.envelope import *
from kvbus.protocol.message import *
from kvbus.protocol.peer import *
from kvbus.protocol.ticket import *
from kvbus.protocol.tools import *
from kvbus.protocol.word import *
