"""The simulated world: the product's own services on event loops with virtual time.

Agents, their tables, bus and data processes are real. The clock of each process, its threads, the
sockets below `kvbus.bus`, and NIXL are simulated. READs land in real memory, late and in parts.
Data processes may die at any moment. One seed gives one run.

The oracle checks the bytes of each completed fetch, released blocks, and live cells. Everything
must end once, within its deadline.
"""
