"""Collects the facts: files of the kernel in this process, what may hang in processes of its own.

Refuses to judge.
"""
