"""Folders of configurations besides configs/: configs/local, and those of installed packages of one's own."""

import functools
import importlib.metadata
import importlib.util
from pathlib import Path

from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.plugins import Plugins
from hydra.plugins.search_path_plugin import SearchPathPlugin

from .errors import RunError

CONFIGS = Path(__file__).resolve().parent.parent / "configs"
#: The user's own, not in git.
LOCAL = CONFIGS / "local"
#: Entry points of installed packages whose value is a package that holds configurations, in groups as configs/ has.
ENTRY_POINTS = "sinkhorn_attention.configs"


def further_folders() -> list[Path]:
    """Folders that are searched after configs/, in this order; of files of one name the first is taken."""
    return [*([LOCAL] if LOCAL.is_dir() else []), *_of_packages()]


@functools.cache
def _of_packages() -> tuple[Path, ...]:
    """The folders that installed packages name.

    Raises:
        RunError: names an entry point that leads to no folder.
    """
    found = []
    for point in importlib.metadata.entry_points(group=ENTRY_POINTS):
        try:
            spec = importlib.util.find_spec(point.value)
        except ImportError:
            spec = None
        places = None if spec is None else spec.submodule_search_locations
        if not places:
            raise RunError(f"the entry point {point.name} of {ENTRY_POINTS} names {point.value}, which is no package")
        found += [Path(place) for place in places]
    return tuple(found)


class FurtherFolders(SearchPathPlugin):
    """Adds these folders to what Hydra searches, for the command and for all that composes a configuration."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        for folder in further_folders():
            search_path.append("further", f"file://{folder}")


def register_folders() -> None:
    """Makes Hydra search these folders, here and in what it composes from now on."""
    Plugins.instance().register(FurtherFolders)
