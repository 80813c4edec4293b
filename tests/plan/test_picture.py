"""The picture is SVG by itself, with an element for each read."""

import re
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from tests.plan.planning import plan, planned

SVG = "{http://www.w3.org/2000/svg}"
MODEL = "model=<b>&,kv_heads=8,head=4,layers=4"


@pytest.mark.parametrize(
    ("prefill", "decode", "num_ranks"),
    [
        (f"tp=3,{MODEL}", f"tp=2,pp=2,{MODEL}", 7),
        (f"tp=16,window=9,{MODEL}", f"tp=4,window=9,{MODEL}", 20),
    ],
)
def test_each_read_and_each_rank_is_one_element_and_what_they_are_is_told_as_text(
    tmp_path: Path, prefill: str, decode: str, num_ranks: int
) -> None:
    file = tmp_path / "plan.svg"
    assert plan("--svg", str(file), prefill=prefill, decode=decode, tokens=40).exit_code == 0
    svg = ET.parse(file).getroot()  # noqa: S314 - our own
    found = planned(prefill=prefill, decode=decode, tokens=40)

    bands = [path for path in svg.iter(f"{SVG}path") if path.get("class") == "read"]
    ranks = [rect for rect in svg.iter(f"{SVG}rect") if rect.get("class") == "rank"]
    unread = [rank for rank in ranks if rank.get("stroke-dasharray")]
    told = {str(one.get("id")): str(one.text) for one in svg if one.get("id")}
    text = file.read_text().replace('xmlns="http://www.w3.org/2000/svg"', "")
    assert len(bands) == len(found["reads"])
    assert (len(ranks), len(unread)) == (num_ranks, len(found["unread_ranks"]))
    assert all("from prefill rank" in str(band[0].text) for band in bands)
    assert set(str(svg.get("aria-labelledby")).split()) == set(told) == {"title", "desc"}
    assert not re.search(r"http|url\(|@import|href|<style|<script|<b>", text)
