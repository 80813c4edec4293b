"""Strangers, and engines that lie."""
