"""The command that says what works on this machine for kvbus, and what does not, and why.

Refuses to change the machine: what a check makes is gone when it ends.

    finding      what was found, how bad it is, and the fix; the verdict over all (pure)
    versions, host, nixl, cuda, agents
                 the families: each collects what it can see, and makes findings of it by
                 functions of plain values, so that every machine can be drawn in a test
    peer, pair   an agent elsewhere, by what it answers; with the one of this side, by what each
                 says of the other
    children     runs what may hang or crash in processes of its own, which are process
    report       what people see
"""
