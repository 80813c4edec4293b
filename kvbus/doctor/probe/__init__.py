"""Collects the facts: from the kernel in this process, what may hang in processes of its own."""
