"""The prefill agents that fetches read from: connections, handshakes, routes and leases."""
