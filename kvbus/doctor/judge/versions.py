"""Owns what is said about Python and the packages: are they those that the project requires.

Refuses to look for newer ones.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from kvbus.doctor.finding import Finding, Severity

_SHOWN = ("nixl", "torch", "pyzmq", "numpy")


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionFacts:
    """``installed`` has the version of each package that was found, by its required name."""

    system: str
    python: str
    python_bounds: str
    requirements: tuple[Requirement, ...]
    installed: Mapping[str, str]


def judge_versions(facts: VersionFacts) -> Iterator[Finding]:
    """One finding for Python, one for each package that is wrong, one for those that are right."""
    yield _python(facts)
    wrong = [one for one in facts.requirements if not _is_met(one, facts)]
    yield from (_package(one, facts) for one in wrong)
    yield _packages([one for one in facts.requirements if one not in wrong], facts)


def _python(facts: VersionFacts) -> Finding:
    found = f"Python {facts.python}, {facts.system}"
    values = {"version": facts.python, "required": facts.python_bounds, "system": facts.system}
    if SpecifierSet(facts.python_bounds).contains(facts.python, prereleases=True):
        return Finding(name="versions.python", severity=Severity.OK, found=found, values=values)
    return Finding(
        name="versions.python",
        severity=Severity.ERROR,
        found=f"{found}; required is Python {facts.python_bounds}",
        why="kvbus uses what older Pythons do not have.",
        mend="Install kvbus into an environment of a Python that is required.",
        values=values,
    )


def _is_met(one: Requirement, facts: VersionFacts) -> bool:
    version = facts.installed.get(one.name)
    return version is not None and one.specifier.contains(version, prereleases=True)


def _package(one: Requirement, facts: VersionFacts) -> Finding:
    version = facts.installed.get(one.name)
    have = f"{one.name} is not installed" if version is None else f"{one.name} {version}"
    return Finding(
        name=f"versions.{one.name}",
        severity=Severity.ERROR,
        found=f"{have}; required is {one.name}{one.specifier}",
        why="kvbus was tested with other versions, and relies on what they do.",
        mend="Install what is required.",
        command=f"pip install '{one.name}{one.specifier}'",
        values={"version": version, "required": str(one.specifier)},
    )


def _packages(right: Iterable[Requirement], facts: VersionFacts) -> Finding:
    versions = {one.name: facts.installed[one.name] for one in right}
    first = [f"{name} {versions[name]}" for name in _SHOWN if name in versions]
    others = len(versions) - len(first)
    shown = ", ".join([*first, f"{others} more"] if others else first)
    return Finding(
        name="versions.packages",
        severity=Severity.OK,
        found=f"as required: {shown or 'none'}",
        values=versions,
    )
