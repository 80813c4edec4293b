"""The SDK that engines import: sessions with a local agent, async and blocking."""

from kvbus.bus import new_secret
from kvbus.engine.decode import DecodeSession, Fetch
from kvbus.engine.kept import KeptSession
from kvbus.engine.link import Link
from kvbus.engine.memory import MemorySession
from kvbus.engine.prefill import Offer, OfferOptions, PrefillSession
from kvbus.engine.rank_memory import KvCache, RankMemory, describe_tensors
from kvbus.engine.thread import SessionThread
from kvbus.memory.cuda import CudaStorage
from kvbus.memory.storage import SharedStorage, share_tensor, share_tensors
from kvbus.protocol.engine import AgentRanks
from kvbus.protocol.ticket import prompt_digest

__all__ = [
    "AgentRanks",
    "CudaStorage",
    "DecodeSession",
    "Fetch",
    "KeptSession",
    "KvCache",
    "Link",
    "MemorySession",
    "Offer",
    "OfferOptions",
    "PrefillSession",
    "RankMemory",
    "SessionThread",
    "SharedStorage",
    "describe_tensors",
    "new_secret",
    "prompt_digest",
    "share_tensor",
    "share_tensors",
]
