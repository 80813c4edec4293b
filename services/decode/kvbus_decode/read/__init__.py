"""Reads: how the chunks of fetches get into the engine's blocks."""
