"""The command that plays an agent for somebody's engine, and says what the engine did wrong.

    COMMAND ◀── lines ── Stage, scenes ──▶ PlayedAgent ──▶ Book ──▶ report
       │                                     ▲   │
       └──── attach, engine socket ──────────┘   └─ what it sees of each message

It needs no NIXL, and no other agent. It uses the declarations of messages and memory, and no code
of agents or of the SDK, as a mistake that both make would not be seen. So it attaches, takes frames
and maps memory by itself.
"""
