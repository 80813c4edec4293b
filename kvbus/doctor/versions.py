"""Says whether Python and the packages are those that the project requires.

Refuses to import a package for its version.
"""

import platform
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, metadata, requires, version

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from kvbus.doctor.finding import ERROR, OK, Finding

PROJECT = "kvbus"
_NAMED = ("nixl", "torch", "pyzmq", "numpy")


def check_versions() -> Iterator[Finding]:
    """What is required, and what is there."""
    bounds = metadata(PROJECT)["Requires-Python"] or ""
    system = f"{platform.system()} {platform.release()} {platform.machine()}"
    yield python_finding(platform.python_version(), bounds, system)
    found = [Requirement(text) for text in requires(PROJECT) or []]
    required = [one for one in found if one.marker is None or one.marker.evaluate({"extra": ""})]
    yield from package_findings(required, {one.name: installed(one.name) for one in required})


def installed(name: str) -> str | None:
    """The version of a package, None when it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def python_finding(python: str, bounds: str, system: str) -> Finding:
    """Whether this Python is within the bounds."""
    is_met = SpecifierSet(bounds).contains(python, prereleases=True)
    found = f"Python {python}, {system}"
    return Finding(
        "versions.python",
        OK if is_met else ERROR,
        found if is_met else f"{found}; required is Python {bounds}",
        {"version": python, "required": bounds, "system": system},
        why="kvbus uses what older Pythons do not have.",
        fix="Install kvbus into an environment of a Python that is required.",
    )


def package_findings(
    required: Sequence[Requirement], versions: Mapping[str, str | None]
) -> Iterator[Finding]:
    """One finding for each package that is wrong, one for those that are right."""
    right: dict[str, str] = {}
    for one in required:
        found = versions.get(one.name)
        if found is not None and one.specifier.contains(found, prereleases=True):
            right[one.name] = found
            continue
        have = f"{one.name} is not installed" if found is None else f"{one.name} {found}"
        yield Finding(
            f"versions.{one.name}",
            ERROR,
            f"{have}; required is {one.name}{one.specifier}",
            {"version": found, "required": str(one.specifier)},
            why="kvbus was tested with other versions, and relies on what they do.",
            fix="Install what is required.",
            command=f"pip install '{one.name}{one.specifier}'",
        )
    named = [f"{name} {right[name]}" for name in _NAMED if name in right]
    if len(right) > len(named):
        named.append(f"{len(right) - len(named)} more")
    yield Finding("versions.packages", OK, f"as required: {', '.join(named) or 'none'}", right)
