import json
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="session")
def golden() -> dict[str, Any]:
    """Outputs of the published vision transformer on weights and inputs that a formula gives."""
    return json.loads((Path(__file__).parents[1] / "golden" / "vit.json").read_text())
