"""Proxies by their options, each started once; a test begins with engines that are well."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache

import pytest

from tests.integrations.proxy.site import Site


@pytest.fixture(scope="package")
def site_of(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Site]]:
    """The proxy with these options."""
    with ExitStack() as stack:

        @cache
        def started(*options: str) -> Site:
            made = Site(tmp_path_factory.mktemp("proxy"), *options)
            stack.callback(made.end)
            return made

        def at_rest(*options: str) -> Site:
            made = started(*options)
            made.rest()
            return made

        yield at_rest


@pytest.fixture
def site(site_of: Callable[..., Site]) -> Site:
    """The proxy as it is without options."""
    return site_of()
