"""Handoffs between two agents that already run: ``kvbus bench-prefill | kvbus bench-decode``.

    cases               the caches and block tables that are handed over
    handed              the line of JSON that goes from one side to the other for each handoff
    prefill, decode     the two sides
    limits, report      what came of each case, what limited it, and how it is shown

The prefill side sets the pace: it offers, prints the ticket, and goes on when that has been read.
So each side has one case in memory at a time.
"""
