"""The SDK for engines in Python; docs/engines.md is its guide."""

from kvbus.bus import new_secret
from kvbus.engine.connection import Connection as Connection
from kvbus.engine.connection import ReconnectingConnection as ReconnectingConnection
from kvbus.engine.handles import Fetch, Offer
from kvbus.engine.later import Completion
from kvbus.engine.later import EndedQueue as EndedQueue
from kvbus.engine.later import Runner as Runner
from kvbus.engine.link import Link
from kvbus.engine.messages import FetchOptions, OfferOptions
from kvbus.engine.rank_memory import KvCache, RankMemory, describe_tensors
from kvbus.engine.sequence import PageName as PageName
from kvbus.engine.sequence import PageView as PageView
from kvbus.engine.storage import CudaStorage as CudaStorage
from kvbus.engine.storage import SharedStorage as SharedStorage
from kvbus.engine.storage import share_tensor as share_tensor
from kvbus.engine.storage import share_tensors as share_tensors
from kvbus.memory.attach import query_agent as query_agent
from kvbus.protocol.engine import AgentRanks, AgentRole, Fetched, Outcome, Park
from kvbus.protocol.ticket import Rendezvous, prompt_digest

__all__ = [
    "AgentRanks",
    "AgentRole",
    "Completion",
    "Fetch",
    "FetchOptions",
    "Fetched",
    "KvCache",
    "Link",
    "Offer",
    "OfferOptions",
    "Outcome",
    "PageName",
    "PageView",
    "Park",
    "RankMemory",
    "Rendezvous",
    "describe_tensors",
    "new_secret",
    "prompt_digest",
]
