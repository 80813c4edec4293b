"""What all tests share: how Hypothesis works here.

A failure is shrunk, but not explained: explaining traces every line, which takes longer than a test
may, and the timeout would hide what failed. An example has no deadline: on a busy machine it may
wait for a core.
"""

from hypothesis import Phase, settings

settings.register_profile(
    "kvbus", deadline=None, phases=[phase for phase in Phase if phase is not Phase.explain]
)
settings.load_profile("kvbus")
