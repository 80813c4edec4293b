"""KV memory geometry: engines, ranks, groups and regions, and the address of each token's bytes."""
# ruff: noqa: F403  the files are the list

from kvbus.geometry.blocks import *
from kvbus.geometry.layouts import *
from kvbus.geometry.spec import *
from kvbus.geometry.validation import *
