"""Specs of ``kvbus plan`` become engines; a mistake is one line that names side, key and value."""

from pathlib import Path
from typing import Any

import pytest

from tests.plan.planning import planned, refused

SMALL = "kv_heads=8,head=128,layers=4"
GROUPS = """
tp = 2
head = 128
kv_heads = 8
[[groups]]
name = "full"
layers = [0, 2]
block = 32
[[groups]]
name = "ssm"
layers = 2
parts = [{name = "conv", units = 8, bytes = 4096}]
"""
COMMON = {"block": 16, "kv_heads": 8, "head": 128, "dtype": "bfloat16", "parts": ["k", "v"]}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "engine.toml"


def engine(text: str) -> dict[str, Any]:
    """What is understood of an engine: its axes joined by dots, its groups by name."""
    found: dict[str, Any] = planned(prefill=text, decode=text)["from"]
    groups = {group.pop("name"): group for group in found["groups"]}
    return {**found, "axes": ".".join(found["axes"]), "groups": groups}


@pytest.mark.parametrize(
    ("text", "wanted", "groups"),
    [
        (
            "tp=4,pp=2,layout=hnd,cross_layer=true,block=64,kv_heads=8,head=128,layers=32,"
            "dtype=fp8,model=m",
            {"tp": 4, "pp": 2, "model": "m", "axes": "block.layer.kv.head.token.dim"},
            {"attention": {"layers": [*range(32)], "block": 64, "dtype": "float8_e4m3fn"}},
        ),
        (
            SMALL,
            {"tp": 1, "pp": 1, "model": "unnamed", "axes": "block.kv.token.head.dim"},
            {"attention": {**COMMON, "layers": [0, 1, 2, 3], "window": None, "state": []}},
        ),
        (
            "attention=mla,head=576,layers=2",
            {},
            {"attention": {"parts": ["latent"], "kv_heads": 1, "head": 576}},
        ),
        (
            f"window=100,{SMALL}",
            {},
            {
                "full": {"layers": [0, 2], "window": None},
                "window": {"layers": [1, 3], "window": 100},
            },
        ),
    ],
    ids=["whole", "common", "latent", "window"],
)
def test_a_short_text_says_all_of_an_engine_and_the_rest_is_common(
    text: str, wanted: dict[str, Any], groups: dict[str, dict[str, Any]]
) -> None:
    found = engine(text)

    assert wanted.items() <= found.items()
    assert groups.keys() == found["groups"].keys()
    for name, group in groups.items():
        assert {key: found["groups"][name][key] for key in group} == group


def test_a_file_may_have_the_keys_of_a_text_or_groups_that_take_the_rest_from_its_top(
    file: Path,
) -> None:
    file.write_text('layout = "HND"\ncross_layer = true\nkv_heads = 8\nhead = 128\nlayers = 4\n')
    assert engine(str(file)) == engine(f"layout=HND,cross_layer=true,{SMALL}")

    file.write_text(GROUPS)
    groups = engine(str(file))["groups"]
    assert [groups["full"][key] for key in ("layers", "block", "kv_heads")] == [[0, 2], 32, 8]
    assert [groups["ssm"][key] for key in ("layers", "state")] == [[3, 4], [["conv", 8, 4096]]]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (f"tp=1025,{SMALL}", "tp='1025': tp is a whole number from 1 to 1024"),
        (f"tp=²,{SMALL}", "tp='²': tp is"),
        (f"pp=5,{SMALL}", "pp=5: more stages than the 4 layers"),
        (f"tp=1024,pp=4,{SMALL}", "tp=1024 times pp=4 is more than 2048 ranks"),
        (f"layout=NDH,{SMALL}", "layout='NDH': layout is NHD, HND, or all axes joined by dots"),
        (f"layout=block.layer.kv.token.head.dim,cross_layer=no,{SMALL}", "has the layer axis"),
        (f"dtype=int3,{SMALL}", "dtype='int3': dtype is one of float32, float16"),
        (f"attention=mla,{SMALL}", "kv_heads=8: with attention=mla"),
        ("window=9,kv_heads=8,head=128,layers=1", "layers is 2 or more, not 1"),
        ("kv_heads=8,head=127,layers=4", "head='127': head is an even number from 2 to 65536"),
        ("head=128,layers=4", "kv_heads is missing: it is a whole number from 1 to 4096"),
        (f"tp=1,tp=2,{SMALL}", "tp is given twice"),
        (f"tpp=1,{SMALL}", "'tpp' is not a key; keys are tp, pp, layout"),
        (f"tp,{SMALL}", "'tp' is not key=value"),
        ("", "a spec is key=value pairs, or a file of them; keys are tp, pp"),
        ("/nowhere/at/all.toml", "neither key=value pairs nor a readable file: No such file"),
    ],
)
def test_a_wrong_text_is_refused_in_one_line_that_names_side_and_key(text: str, told: str) -> None:
    message = refused(prefill=text)

    assert message.startswith("error: --from: ")
    assert len(message) < 300
    assert told in message


GROUP = "head = 2\nkv_heads = 1\n[[groups]]\nname = 'a'\n"
STATE = "layers = 1\nparts = [{{name = 'x', units = {units}, bytes = 1}}]"
OTHER = "layers = [0]\n[[groups]]\nname = "


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("tp = ", "is not TOML"),
        ("#" * (1 << 20) + "\n", "more than 1048576 bytes"),
        ("tp = true", "tp='true': tp is a whole number"),
        ("tp = 2\nlayers = 3\n[[groups]]\nname = 'a'", "layers belongs into each of the groups"),
        ("groups = []", "groups is 1 to 64 tables"),
        ("[[groups]]\nlayers = 3", "group 1: name is missing"),
        (GROUP, "group 1: layers='None': layers is a list of layer numbers"),
        (f"{GROUP}layers = ['x']", "layers="),
        (f"{GROUP}layers = 1\ntp = 2", "group 1: 'tp' is not a key"),
        (f"{GROUP}layers = 1\nparts = 3", "parts='3': parts is a list of"),
        (f"{GROUP}{STATE.format(units=1)}\nblock = 2", "block does not go with parts"),
        (f"{GROUP}{STATE.format(units=0)}", "units='0': units is a whole number from 1 to 4096"),
        (f"{GROUP}{OTHER}'b'\nlayers = [0]", "a layer is in two groups"),
        (f"{GROUP}{OTHER}'a'\nlayers = [1]", "two groups have one name"),
    ],
)
def test_a_wrong_file_is_refused_in_one_line(file: Path, text: str, told: str) -> None:
    file.write_text(text, encoding="latin-1")

    assert told in refused(prefill=str(file))
