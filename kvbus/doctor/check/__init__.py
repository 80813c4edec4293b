"""From facts to findings: what is good, what is a limit, what to do.

Refuses to have effects: facts go in, findings come out, so every machine can be drawn in a test.
"""
