"""Tries to share memory of an expandable segment, and prints why that is refused."""

import torch

from kvbus.errors import SegmentError
from kvbus.memory import share_tensor

try:
    share_tensor(torch.zeros(32 << 20, dtype=torch.uint8, device="cuda:0"))
except SegmentError as error:
    print(error.message)
