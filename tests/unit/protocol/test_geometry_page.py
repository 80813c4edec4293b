"""The page on geometry: its example is true."""

import re
from pathlib import Path
from typing import Any

from tests.unit.planning.planning import planned

TEXT = (Path(__file__).parents[3] / "docs" / "internals" / "geometry.md").read_text()


def test_the_strides_of_the_example_are_those_of_its_ranks() -> None:
    (code,) = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    names: dict[str, Any] = {}
    exec(code, names)  # noqa: S102 - our own page

    ranks = [("prefill", rank) for rank in names["theirs"]] + [("decode", names["ours"][0])]

    for side, rank in ranks:
        (region,) = rank.regions
        heads = range(region.first_head, region.first_head + region.num_heads)
        cells = (
            f"{side} {rank.rank}",
            ", ".join(map(str, heads)),
            " ".join(f"{axis.name}={axis.stride_bytes}" for axis in region.axes),
        )
        assert f"| {' | '.join(cells)} |" in TEXT


def test_the_example_takes_as_many_reads_as_kvbus_plan_says() -> None:
    shape = "layers=1,kv_heads=2,head=2,dtype=f16"
    plan = planned(prefill=f"tp=2,block=2,{shape}", decode=f"layout=HND,block=4,{shape}", tokens=5)
    direct, staged, packed = (plan["paths"][path] for path in ("direct", "staged", "packed"))
    assert (direct["tiles"], direct["scattered_bytes"]) == (0, 0)
    assert f"**direct** takes {direct['descriptors']} READs, no copy." in TEXT
    assert f"**staged** takes {staged['descriptors']} READs:" in TEXT
    assert packed["bytes"] == packed["scattered_bytes"]
    copied = f"and gathers and scatters {packed['bytes']} bytes"
    assert f"**packed** takes {packed['descriptors']} READs, {copied}" in TEXT
