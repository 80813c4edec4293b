"""The picture is SVG by itself, with an element for each read, and readable on any ground."""

import re
from xml.etree import ElementTree as ET

import pytest

from kvbus.plan.picture import COLOURS, GREY, picture
from kvbus.plan.plan import Plan, PlanOptions, make_plan

SVG = "{http://www.w3.org/2000/svg}"
SMALL = "kv_heads=8,head=4,layers=4"
WHITE, DARK = "#ffffff", "#0d1117"


def planned(prefill: str, decode: str, num_tokens: int = 40) -> Plan:
    return make_plan(PlanOptions(prefill=prefill, decode=decode, tokens=num_tokens))


def drawn(plan: Plan) -> ET.Element:
    return ET.fromstring(picture(plan))  # noqa: S314 - our own


def bands(svg: ET.Element) -> list[ET.Element]:
    return [path for path in svg.iter(f"{SVG}path") if path.get("class") == "read"]


@pytest.mark.parametrize(
    ("prefill", "decode"),
    [
        (SMALL, SMALL),
        (f"tp=3,{SMALL}", f"tp=2,pp=2,{SMALL}"),
        (f"tp=16,window=9,{SMALL}", f"tp=4,window=9,{SMALL}"),
        ("tp=8,attention=mla,head=64,layers=4", "attention=mla,head=64,layers=4"),
        (f"tp=64,{SMALL}", f"tp=64,{SMALL}"),
    ],
)
def test_each_read_and_each_rank_is_one_element(prefill: str, decode: str) -> None:
    plan = planned(prefill, decode)

    svg = drawn(plan)

    ranks = [rect for rect in svg.iter(f"{SVG}rect") if rect.get("class") == "rank"]
    assert len(bands(svg)) == len(plan.reads)
    assert len(ranks) == plan.prefill.engine.num_ranks + plan.decode.engine.num_ranks
    assert len([rank for rank in ranks if rank.get("stroke-dasharray")]) == len(plan.unread_ranks)


def test_a_band_goes_from_the_heads_that_are_read_to_where_they_are_held() -> None:
    plan = planned(SMALL, f"tp=2,{SMALL}")

    svg = drawn(plan)

    # 8 heads of 16 pixels on the left; on the right two ranks of 4, 6 pixels apart.
    shapes = [str(band.get("d")) for band in bands(svg)]
    tops = [re.findall(r"M\S+ (\S+)C.*? (\S+)V", shape)[0] for shape in shapes]
    bottoms = [re.findall(r"V(\S+)C.* (\S+)Z", shape)[0] for shape in shapes]
    assert tops == [("0", "0"), ("64", "70")]
    assert bottoms == [("64", "64"), ("134", "128")]


def test_a_screen_reader_is_told_what_is_drawn() -> None:
    svg = drawn(planned(f"tp=16,{SMALL}", f"tp=2,{SMALL}"))

    told = {str(one.get("id")): str(one.text) for one in svg if one.get("id")}
    assert svg.get("role") == "img"
    assert set(str(svg.get("aria-labelledby")).split()) == set(told) == {"title", "desc"}
    assert "16 ranks of the prefill engine" in told["desc"]
    assert "Nothing is read from prefill ranks" in told["desc"]
    assert all("from prefill rank" in str(band[0].text) for band in bands(svg))


def test_groups_have_colours_of_their_own() -> None:
    svg = drawn(planned(f"window=9,{SMALL}", f"window=9,{SMALL}"))

    assert [band.get("fill") for band in bands(svg)] == list(COLOURS[:2])


def test_nothing_is_loaded_from_elsewhere() -> None:
    text = picture(planned(SMALL, SMALL)).replace('xmlns="http://www.w3.org/2000/svg"', "")

    assert not re.search(r"http|url\(|@import|href|<style|<script", text)


def test_a_name_of_markup_is_text() -> None:
    spec = f"model=<b>&,{SMALL}"

    assert drawn(planned(spec, spec)).tag == f"{SVG}svg"


@pytest.mark.parametrize("ground", [WHITE, DARK])
def test_colours_are_readable_on_white_and_on_dark(ground: str) -> None:
    assert contrast(GREY, ground) >= 4
    assert min(contrast(colour, ground) for colour in COLOURS) >= 3


def contrast(one: str, other: str) -> float:
    """Of WCAG 2."""
    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


def luminance(colour: str) -> float:
    shares = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [s / 12.92 if s <= 0.04045 else ((s + 0.055) / 1.055) ** 2.4 for s in shares]
    return sum(w * s for w, s in zip((0.2126, 0.7152, 0.0722), linear, strict=True))
