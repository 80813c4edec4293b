"""Where one handoff's time goes: notes of all four processes, joined by their common clock."""
