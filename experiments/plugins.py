"""A user's own modules: what they register is known wherever a run is planned, trained or read again."""

import importlib
import os
from collections.abc import Mapping
from typing import Any

from sinkhorn_attention.normalizers.base import MODULES

from .errors import RunError


def import_plugins(config: Mapping[str, Any]) -> None:
    """Imports the modules of a configuration's `plugins`, here and in the processes that this one starts.

    Args:
        config: resolved; older runs' have no such key.

    Raises:
        RunError: names a module that cannot be imported.
    """
    modules = config.get("plugins") or []
    for module in modules:
        try:
            importlib.import_module(module)
        except Exception as error:  # whatever a module does at its import
            raise RunError(
                f"plugins: {module} cannot be imported ({type(error).__name__}: {error}): it has to be installed, or "
                "to lie in a folder of PYTHONPATH or in the one where the command is given"
            ) from error
    known = [name for name in os.environ.get(MODULES, "").split(",") if name]
    if added := [module for module in modules if module not in known]:
        os.environ[MODULES] = ",".join([*known, *added])
