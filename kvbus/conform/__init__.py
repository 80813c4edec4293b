"""Conformance test of an engine: a command that plays its agent.

COMMAND ◀── lines ── Stage, scenes ──▶ PlayedAgent ──▶ Book ──▶ report
   │                                     ▲   │
   └──── attach, engine socket ──────────┘   └─ each message, checked

It uses no code of agents or the SDK, which would hide a shared mistake.
"""
