"""Conformance test of an engine: a command that plays its agent and reports violations.

    COMMAND ◀── lines ── Stage, scenes ──▶ PlayedAgent ──▶ Book ──▶ report
       │                                     ▲   │
       └──── attach, engine socket ──────────┘   └─ each message, checked

It uses no code of agents or of the SDK, because it would not detect a shared mistake.
"""
