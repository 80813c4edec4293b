"""The JSON Schema beside the page is that of the structs, and has all that the vectors show."""

import json
from typing import Any

import pytest

from docs.generate_schema import PAGE, schema
from kvbus.protocol import EVENTS, NOTICES
from tests.vectors.test_vectors import VECTORS, body_of_vector

SCHEMA: dict[str, Any] = json.loads(PAGE.read_text())
DEFS: dict[str, Any] = SCHEMA["$defs"]


def test_the_schema_is_what_the_structs_say_today() -> None:
    assert PAGE.read_text() == schema(), "stale: run python docs/generate_schema.py"


def test_every_operation_has_its_bodies() -> None:
    asked = {op for room in SCHEMA["x-requests"].values() for op in room}
    shown = {v["message"]["op"] for v in VECTORS if "op" in v["message"] and "topic" not in v}

    assert asked | set(SCHEMA["x-notices"]) == shown
    assert set(SCHEMA["x-events"]) == set(EVENTS)
    assert set(SCHEMA["x-notices"]) == {kind.op for kind in NOTICES}


@pytest.mark.parametrize("vector", VECTORS, ids=lambda v: f"{v['kind']}-{v['name']}")
def test_the_schema_has_each_field_of_a_vector_and_requires_no_other(vector: Any) -> None:
    definition, body = DEFS[vector["name"]], body_of_vector(vector)

    assert set(body) <= set(definition["properties"])
    assert set(definition.get("required", ())) <= set(body)
