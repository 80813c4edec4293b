"""Specs of ``kvbus plan`` become engines; a mistake is one line that names side, key and value."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvbus.geometry import EngineSpec, GroupSpec, StatePart, state_group
from tests.unit.planning.planning import planned, refused

SMALL = "kv_heads=8,head=128,layers=4"
FILE = """
engine_id = "e"
model = "m"
tp_size = 2
pp_size = 2
[[groups]]
name = "full"
layers = [0, 2]
block_size = 32
num_kv_heads = 8
head_dim = 128
dtype = "bfloat16"
[[groups]]
name = "ssm"
layers = [3]
block_size = 1
num_kv_heads = 1
head_dim = 1
dtype = "uint8"
parts = ["conv"]
state = [{name = "conv", num_units = 8, unit_bytes = 4096}]
"""
COMMON = {"block_size": 16, "num_kv_heads": 8, "head_dim": 128, "dtype": "bfloat16"}


def engine(text: str) -> dict[str, Any]:
    """The engine of a SPEC, with its axes joined by dots, and its groups by name."""
    side: dict[str, Any] = planned(prefill=text, decode=text)["from"]
    groups = {group.pop("name"): group for group in side["engine"]["groups"]}
    return {**side["engine"], "axes": ".".join(side["axes"]), "groups": groups}


@pytest.mark.parametrize(
    ("text", "wanted", "groups"),
    [
        (
            "tp=4,pp=2,layout=hnd,cross_layer=true,block=64,kv_heads=8,head=128,layers=32,"
            "dtype=fp8,model=m",
            {"tp_size": 4, "pp_size": 2, "model": "m", "axes": "block.layer.kv.head.token.dim"},
            {"attention": {"layers": [*range(32)], "block_size": 64, "dtype": "float8_e4m3fn"}},
        ),
        (
            SMALL,
            {"tp_size": 1, "pp_size": 1, "model": "unnamed", "axes": "block.kv.token.head.dim"},
            {"attention": {**COMMON, "parts": ["k", "v"], "layers": [*range(4)], "window": None}},
        ),
        (
            "attention=mla,head=576,layers=2",
            {},
            {"attention": {"parts": ["latent"], "num_kv_heads": 1, "head_dim": 576}},
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
def test_short_text_describes_whole_engine_and_rest_is_common(
    text: str, wanted: dict[str, Any], groups: dict[str, dict[str, Any]]
) -> None:
    found = engine(text)
    assert wanted.items() <= found.items()
    assert groups.keys() == found["groups"].keys()
    for name, group in groups.items():
        assert {key: found["groups"][name][key] for key in group} == group


def test_file_has_engine_as_in_protocol_and_layout_after_it(tmp_path: Path) -> None:
    state = state_group("ssm", (3,), (StatePart("conv", 8, 4096),))
    full = GroupSpec("full", (0, 2), 32, 8, 128, "bfloat16")
    spec = EngineSpec("e", "m", 2, (full, state), 2)
    files = tmp_path / "engine.toml", tmp_path / "engine.json"
    files[0].write_text(FILE)
    files[1].write_bytes(msgspec.json.encode(spec))
    for file in files:
        found = planned(prefill=f"{file},layout=HND,cross_layer=true", decode=str(file))
        assert msgspec.convert(found["from"]["engine"], EngineSpec) == spec
        assert ".".join(found["from"]["axes"]) == "block.layer.kv.head.token.dim"
        assert ".".join(found["to"]["axes"]) == "block.kv.token.head.dim"


@pytest.mark.parametrize("has_it", ["prefill", "decode"])
def test_optional_group_that_other_side_lacks_is_not_read(tmp_path: Path, has_it: str) -> None:
    both, without = tmp_path / "both.toml", tmp_path / "without.toml"
    both.write_text(f"{FILE}optional = true\n")
    without.write_text(FILE[: FILE.rindex("[[groups]]")].replace("pp_size = 2", "pp_size = 1"))
    sides = dict.fromkeys(("prefill", "decode"), str(without)) | {has_it: str(both)}
    found = planned(**sides)
    assert {read["group"] for read in found["reads"]} == {"full"}


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (f"tp=1025,{SMALL}", "'tp' must be at most 1024"),
        (f"tp=²,{SMALL}", "'tp' must be an integer, not a string"),
        (f"pp=5,{SMALL}", "pp=5 is more than the 4 layers"),
        (f"tp=1024,pp=4,{SMALL}", "tp times pp is more than 2048 ranks"),
        (f"layout=NDH,{SMALL}", "layout 'ndh'"),
        (f"dtype=int3,{SMALL}", "dtype 'int3' of group 'attention' is not one of float32"),
        (f"attention=mla,{SMALL}", "kv_heads is left out with attention=mla"),
        ("window=9,kv_heads=8,head=128,layers=1", "layers is 2 or more"),
        ("head=128,layers=4", "kv_heads is left out with attention=mla, and needed without"),
        ("kv_heads=8,head=128", "'layers' is missing; --help describes a SPEC"),
        (f"tp=1,tp=2,{SMALL}", "'tp=2' is not a key=value that is given once"),
        (f"tpp=1,{SMALL}", "'tpp' is unknown"),
        (f"{SMALL},tp", "'tp' is not a key=value"),
        ("/nowhere/at/all.toml", "No such file"),
    ],
)
def test_wrong_text_is_refused_in_one_line_with_side_and_key(text: str, told: str) -> None:
    message = refused(prefill=text)
    assert message.startswith("error: --from: ")
    assert len(message) < 300
    assert told in message


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("tp = ", "Invalid value"),
        ("#" * (1 << 20) + "\n", "more than 1048576 bytes"),
        ("\xff", "UTF-8"),
        ("engine_id = 'e'\nmodel = 'm'\ntp_size = 1\ngroups = []", "'groups' must not be empty"),
    ],
)
def test_a_wrong_file_is_refused_in_one_line(tmp_path: Path, text: str, told: str) -> None:
    file = tmp_path / "engine.toml"
    file.write_text(text, encoding="latin-1")
    assert told in refused(prefill=str(file))
