"""The prefill agent: offers the KV of a prefill engine and leases it to decode agents."""
