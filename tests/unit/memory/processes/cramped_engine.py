"""An engine whose shared memory holds 1 MiB prints the error of sharing 4 MiB."""

import torch

from kvbus.engine import share_tensor
from kvbus.errors import SegmentError

tensor = torch.ones(1 << 20)
address = tensor.data_ptr()
try:
    share_tensor(tensor)
except SegmentError as error:
    print(error, tensor.data_ptr() == address)
