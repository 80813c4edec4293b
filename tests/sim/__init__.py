"""The simulated world: the product's own services on event loops with virtual time.

Real are `DecodeService`, `PrefillService` and all that is below them: tables, bus, retries, reply
cache, notices, sessions, leases, routes, reads, packing, drains. Simulated are the clock of each
process, its threads, the sockets below `kvbus.bus`, and NIXL. READs land in real memory, late and
in parts. A data process is the product's `DataServer` on virtual time, and may die at any moment.
One seed gives one run.

    world.py      the clock, and what is drawn by luck    network.py   sockets, links, cuts
    data.py       data processes, and their ends          nixl.py      READs that land late
    agent.py      an agent as a process                   engine.py    engines, their memory
    handoffs.py   requests, and the oracle                cluster.py   all of them, their faults
    memory.py     memory that is lent on one machine      worlds.py    what a run is like

The oracle knows bytes and ends: what a completed fetch has read, which bytes change after their
blocks were given back, which cells are live then, and that everything ends once, within its
deadline.
"""
