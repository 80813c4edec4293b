"""The prefill agents that fetches read from: connections, handshakes, routes and leases."""

from kvbus_decode.peer.directory import Extent, PeerAddress
from kvbus_decode.peer.nixl import NixlMemory
from kvbus_decode.peer.warm import WarmPeers

__all__ = ["Extent", "NixlMemory", "PeerAddress", "WarmPeers"]
