"""The command that says what works on this machine for kvbus, and what does not, and why.

It changes nothing: what a check makes is gone when it ends.
"""
