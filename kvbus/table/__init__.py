"""The kit of the sans-IO state machines: tables, deadlines, and what drives them (pure)."""
