"""Where the descriptors of foreign protocols live: a pool of their own.

Their owners' packages put the same full names into protobuf's default pool, which takes a name
once. Apart, a process may hold both, as tests and whoever embeds a router do. `make gen` lets
the stubs in this package import this module in place of google.protobuf.descriptor_pool.
"""

from __future__ import annotations

from google.protobuf.descriptor_pool import DescriptorPool

_POOL = DescriptorPool()


def Default() -> DescriptorPool:  # noqa: N802  (the name that generated code calls)
    """Returns the pool of foreign protocols."""
    return _POOL
