"""Collects the versions of Python and of the packages that the project requires.

Refuses to import any of them.
"""

import platform
from importlib.metadata import PackageNotFoundError, metadata, requires, version

from packaging.requirements import Requirement

from kvbus.doctor.judge.versions import VersionFacts

PROJECT = "kvbus"


def installed_version(name: str) -> str | None:
    """The version of a package, None when it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def version_facts() -> VersionFacts:
    """What is required, and what is there."""
    found = [Requirement(text) for text in requires(PROJECT) or []]
    requirements = tuple(
        one for one in found if one.marker is None or one.marker.evaluate({"extra": ""})
    )
    versions = {one.name: installed_version(one.name) for one in requirements}
    return VersionFacts(
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        python=platform.python_version(),
        python_bounds=metadata(PROJECT)["Requires-Python"] or "",
        requirements=requirements,
        installed={name: text for name, text in versions.items() if text is not None},
    )
