"""Says whether Python and the packages are those that the project requires."""

from collections.abc import Iterator, Mapping

import msgspec
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from kvbus.doctor.finding import ERROR, OK, Finding, finding

_NAMED = ("nixl", "torch", "pyzmq", "numpy")


class VersionFacts(msgspec.Struct, frozen=True, kw_only=True):
    """``installed`` has the version of each package that was found, by its required name."""

    system: str
    python: str
    python_bounds: str
    requirements: tuple[Requirement, ...]
    installed: Mapping[str, str]


def check_versions(facts: VersionFacts) -> Iterator[Finding]:
    """One finding for Python, one for each package that is wrong, one for those that are right."""
    yield _python(facts)
    wrong = [one for one in facts.requirements if not _is_met(one, facts)]
    yield from (_package(one, facts.installed.get(one.name)) for one in wrong)
    right = [one.name for one in facts.requirements if one not in wrong]
    named = [f"{name} {facts.installed[name]}" for name in _NAMED if name in right]
    if len(right) > len(named):
        named.append(f"{len(right) - len(named)} more")
    found = f"as required: {', '.join(named) or 'none'}"
    yield finding("versions.packages", OK, found, {name: facts.installed[name] for name in right})


def _python(facts: VersionFacts) -> Finding:
    is_met = SpecifierSet(facts.python_bounds).contains(facts.python, prereleases=True)
    found = f"Python {facts.python}, {facts.system}"
    return finding(
        "versions.python",
        OK if is_met else ERROR,
        found if is_met else f"{found}; required is Python {facts.python_bounds}",
        {"version": facts.python, "required": facts.python_bounds, "system": facts.system},
        why="kvbus uses what older Pythons do not have.",
        fix="Install kvbus into an environment of a Python that is required.",
    )


def _is_met(one: Requirement, facts: VersionFacts) -> bool:
    version = facts.installed.get(one.name)
    return version is not None and one.specifier.contains(version, prereleases=True)


def _package(one: Requirement, version: str | None) -> Finding:
    have = f"{one.name} is not installed" if version is None else f"{one.name} {version}"
    return finding(
        f"versions.{one.name}",
        ERROR,
        f"{have}; required is {one.name}{one.specifier}",
        {"version": version, "required": str(one.specifier)},
        why="kvbus was tested with other versions, and relies on what they do.",
        fix="Install what is required.",
        command=f"pip install '{one.name}{one.specifier}'",
    )
