"""The simulated world: the product's own services on event loops with virtual time.

Real are `DecodeService`, `PrefillService` and all that is below them: tables, bus, retries, reply
cache, notices, sessions, leases, routes, reads, packing, drains. Simulated are the clock of each
process, its threads, the sockets below `kvbus.bus`, and the transport, which lands bytes in real
memory late and in parts. One seed gives one run.

    world.py      the clock, and what is drawn by luck    network.py   sockets, links, cuts
    transport.py  READs that land late                    agent.py     an agent as a process
    engine.py     engines as processes, their memory      handoffs.py  requests, and the oracle
    cluster.py    all of them, and their faults           worlds.py    what a run is like
    memory.py     memory that is lent on one machine

The oracle knows bytes and ends: what a completed fetch has read, which bytes change after their
blocks were given back, which words are live then, and that everything ends once, within its
deadline.
"""
