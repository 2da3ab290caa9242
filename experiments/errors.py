"""The one exception for what a user can put right."""

from hydra.errors import CompactHydraException


class RunError(CompactHydraException):
    """A fault that its message explains in full: what, where and what to do. Shown without a traceback."""
