"""A sweeper of Hydra's that goes by what the runs return, as those that search do; named by tests."""

import json
import os
from pathlib import Path
from typing import Any

from hydra.core.plugins import Plugins

from experiments.train import BASIC_SWEEPER

# Hydra loads the modules of its plugins once more when it looks for them: the class is the one that it has found.
Basic: Any = Plugins.instance().class_name_to_class[BASIC_SWEEPER]


class Searching(Basic):
    """Tries all combinations; the value of each goes to the file that the variable SEARCHED names."""

    def sweep(self, arguments: list[str]) -> Any:
        """Tells what the sweep's runs returned."""
        batches = super().sweep(arguments)
        found = {" ".join(job.overrides): job.return_value for batch in batches for job in batch}
        Path(os.environ["SEARCHED"]).write_text(json.dumps(found))
        return batches
