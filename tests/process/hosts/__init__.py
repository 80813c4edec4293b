"""Agents of several hosts, which are network namespaces."""
