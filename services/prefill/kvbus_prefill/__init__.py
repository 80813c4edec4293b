"""Prefill agent: offers the KV of prefill engines, and leases it to decode agents."""
