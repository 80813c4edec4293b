"""The command ``kvbus trace``: one request over all agents, on one clock.

command     asks every agent, several times: what it remembers, and what its clock says
timeline    the spans of all agents on our clock, where the time went, how it failed (pure)
waterfall   the timeline for a terminal
chrome      the timeline as a file for Perfetto or chrome://tracing (pure)
"""

from kvbus.trace.chrome import chrome_file
from kvbus.trace.timeline import UNKNOWN, AgentTrace, Timeline, covered_s, failure_of
from kvbus.trace.waterfall import draw_waterfall, reasons

__all__ = [
    "UNKNOWN",
    "AgentTrace",
    "Timeline",
    "chrome_file",
    "covered_s",
    "draw_waterfall",
    "failure_of",
    "reasons",
]
