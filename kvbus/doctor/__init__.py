"""The command that says what works on this machine for kvbus, and what does not, and why.

Refuses to change the machine: what a check makes is gone when it ends.

    finding   what was found, how bad it is, and the mend; the verdict over all (pure)
    judge     from facts to findings, one module a family (pure)
    probe     collects the facts; what may hang or crash runs in processes of its own
    examine   runs the families in turn
    report    what people see; outcome is the JSON
"""
