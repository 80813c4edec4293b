"""Topics of events: an event's topic is its op, so that a subscriber gets only what it acts on.

Refuses nothing; both ends of PUB/SUB agree on it by importing it.
"""

HEARTBEAT = "heartbeat"
