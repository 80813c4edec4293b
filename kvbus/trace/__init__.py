"""The command ``kvbus trace``: one request over all agents, on one clock.

ask         every agent, several times: what it remembers, and what its clock says
clocks      where an agent's clock lies on ours, by its answers (pure)
timeline    the spans of all agents on our clock, and where the time went (pure)
failure     how a fetch failed (pure)
waterfall   the timeline for a terminal
chrome      the timeline as a file for Perfetto or chrome://tracing (pure)
"""

from kvbus.trace.chrome import chrome_file
from kvbus.trace.timeline import UNKNOWN, AgentTrace, Timeline, covered_s

__all__ = [
    "UNKNOWN",
    "AgentTrace",
    "Timeline",
    "chrome_file",
    "covered_s",
]
