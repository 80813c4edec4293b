"""The command ``kvbus doctor``: checks whether kvbus works on this machine.

A check removes everything that it created.
"""
