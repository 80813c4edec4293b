"""The file for Perfetto has every span, and in a lane no two that overlap in part."""

import json
from collections import defaultdict
from itertools import combinations

from kvbus.trace import Timeline, chrome_file
from tests.trace.traces import fetch, offer


def test_every_span_is_in_the_file_in_microseconds_from_the_start() -> None:
    written = json.loads(chrome_file(Timeline.of([offer(), fetch()], now_s=20.0), "r"))

    events = written["traceEvents"]
    names = {one["args"]["name"] for one in events if one["ph"] == "M"}
    assert names == {"prefill prefill-0", "decode decode-0"}
    (claiming,) = [one for one in events if one["name"] == "claiming"]
    assert (claiming["ts"], claiming["dur"]) == (1e6, 1e6)
    assert sum(one["ph"] == "X" for one in events) == 13


def test_spans_of_a_lane_lie_side_by_side_or_in_each_other() -> None:
    events = json.loads(chrome_file(Timeline.of([offer(), fetch()], now_s=20.0), "r"))
    lanes = defaultdict(list)
    for one in events["traceEvents"]:
        if one["ph"] == "X":
            lanes[one["pid"], one["tid"]].append((one["ts"], one["ts"] + one["dur"]))

    for spans in lanes.values():
        for (a, b), (c, d) in combinations(spans, 2):
            assert b <= c or d <= a or (a <= c and d <= b) or (c <= a and b <= d)
