"""The command that says what works on this machine for kvbus, and what does not, and why.

Refuses to change the machine: what a check makes is gone when it ends.

    finding      what was found, how bad it is, and the fix; the verdict over all (pure)
    check        from facts to findings, one function a family (pure)
    probe        collects the facts; what may hang or crash runs in processes of its own
    run_checks   runs the families in turn
    report       what people see
"""
