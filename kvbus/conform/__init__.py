"""The command that plays an agent for somebody's engine, and says what the engine did wrong.

    COMMAND ◀── lines ── steps ──▶ PlayedAgent ──▶ Book ──▶ report
       │                              ▲   │
       └── attach, engine socket ─────┘   └─ what it sees of each message

Refuses to move bytes between machines: it needs no NIXL, and no other agent.
"""
