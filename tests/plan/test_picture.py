"""The picture is SVG by itself, with an element for each read, and readable on any ground."""

import re
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from tests.plan.planning import plan, planned

SVG = "{http://www.w3.org/2000/svg}"
SMALL = "kv_heads=8,head=4,layers=4"
WHITE, DARK = "#ffffff", "#0d1117"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "plan.svg"


def drawn(file: Path, prefill: str, decode: str) -> ET.Element:
    result = plan("--svg", str(file), prefill=prefill, decode=decode, tokens=40)
    assert result.exit_code == 0
    return ET.parse(file).getroot()  # noqa: S314 - our own


def bands(svg: ET.Element) -> list[ET.Element]:
    return [path for path in svg.iter(f"{SVG}path") if path.get("class") == "read"]


@pytest.mark.parametrize(
    ("prefill", "decode", "num_ranks"),
    [
        (SMALL, SMALL, 2),
        (f"tp=3,{SMALL}", f"tp=2,pp=2,{SMALL}", 7),
        (f"tp=16,window=9,{SMALL}", f"tp=4,window=9,{SMALL}", 20),
        ("tp=8,attention=mla,head=64,layers=4", "attention=mla,head=64,layers=4", 9),
        (f"tp=64,{SMALL}", f"tp=64,{SMALL}", 128),
    ],
)
def test_each_read_and_each_rank_is_one_element(
    file: Path, prefill: str, decode: str, num_ranks: int
) -> None:
    svg = drawn(file, prefill, decode)

    told = planned(prefill=prefill, decode=decode, tokens=40)
    ranks = [rect for rect in svg.iter(f"{SVG}rect") if rect.get("class") == "rank"]
    unread = [rank for rank in ranks if rank.get("stroke-dasharray")]
    assert len(bands(svg)) == len(told["reads"])
    assert (len(ranks), len(unread)) == (num_ranks, len(told["unread_ranks"]))


def test_a_band_goes_from_the_heads_that_are_read_to_where_they_are_held(file: Path) -> None:
    svg = drawn(file, SMALL, f"tp=2,{SMALL}")

    # 8 heads of 16 pixels on the left; on the right two ranks of 4, 6 pixels apart.
    shapes = [str(band.get("d")) for band in bands(svg)]
    tops = [re.findall(r"M\S+ (\S+)C.*? (\S+)V", shape)[0] for shape in shapes]
    bottoms = [re.findall(r"V(\S+)C.* (\S+)Z", shape)[0] for shape in shapes]
    assert tops == [("0", "0"), ("64", "70")]
    assert bottoms == [("64", "64"), ("134", "128")]


def test_a_screen_reader_is_told_what_is_drawn_and_a_name_of_markup_is_text(file: Path) -> None:
    svg = drawn(file, f"tp=16,model=<b>&,{SMALL}", f"tp=2,model=<b>&,{SMALL}")

    told = {str(one.get("id")): str(one.text) for one in svg if one.get("id")}
    assert svg.get("role") == "img"
    assert set(str(svg.get("aria-labelledby")).split()) == set(told) == {"title", "desc"}
    assert "16 ranks of the prefill engine" in told["desc"]
    assert "Nothing is read from prefill ranks" in told["desc"]
    assert all("from prefill rank" in str(band[0].text) for band in bands(svg))


def test_nothing_is_loaded_from_elsewhere_and_groups_have_colours_for_any_ground(
    file: Path,
) -> None:
    svg = drawn(file, f"window=9,{SMALL}", f"window=9,{SMALL}")

    text = file.read_text().replace('xmlns="http://www.w3.org/2000/svg"', "")
    colours = [str(band.get("fill")) for band in bands(svg)]
    assert not re.search(r"http|url\(|@import|href|<style|<script", text)
    assert len(set(colours)) == len(colours) == 2
    assert all(contrast(one, ground) >= 3 for one in colours for ground in (WHITE, DARK))


def test_a_picture_that_cannot_be_written_is_an_error() -> None:
    result = plan("--svg", "/nowhere/at/all.svg")

    assert result.exit_code == 2
    assert result.stderr.startswith("error: --svg: cannot write '/nowhere/at/all.svg'")


def contrast(one: str, other: str) -> float:
    """Of WCAG 2."""
    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


def luminance(colour: str) -> float:
    shares = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [s / 12.92 if s <= 0.04045 else ((s + 0.055) / 1.055) ** 2.4 for s in shares]
    return sum(w * s for w, s in zip((0.2126, 0.7152, 0.0722), linear, strict=True))
