"""Connectors of real engines, and routers. Integrations use only the public SDK."""
