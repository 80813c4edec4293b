"""From facts to findings, one module for each family of checks.

Refuses to have effects: facts go in, findings come out, so every machine can be drawn in a test.
"""
