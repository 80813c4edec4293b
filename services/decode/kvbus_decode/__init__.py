"""Decode agent: fetches offered KV into the blocks of a decode engine."""
