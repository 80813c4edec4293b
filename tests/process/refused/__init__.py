"""Malformed frames, invalid engines and invalid requests."""
