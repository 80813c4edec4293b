"""Demo: a small transformer with a paged KV cache, and two engines that hand requests off.

It uses only the SDK, and torch only in the modules ``engine`` and ``model``.
"""
