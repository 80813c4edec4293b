"""What KV memory means: engines, ranks, groups and regions, and where each token's bytes lie."""
# ruff: noqa: F403  the files are the list

from kvbus.geometry.blocks import *
from kvbus.geometry.layouts import *
from kvbus.geometry.spec import *
from kvbus.geometry.validation import *
