"""Checks at sizes that take seconds."""

import importlib
from collections.abc import Callable

import pytest
import torch

from experiments.theory import operator
from experiments.theory.base import Result
from experiments.theory.base import parse as parse_options

SMALL = {
    "invariance": "n=16 counts=[1,3,5,9]",
    "gradient_flow": "n=4 steps=20 time=0.5",
    "heat_limit": "n=200 eps=[0.1,0.2] sample_sizes=[50,100,200] repeats=64 particles=60 steps=10 time=0.3",
    "clusters": "n=12 repeats=1 betas=[1.0,25.0] step=0.25 time=12 seen_at=3 n_iters=41",
    "regularity": "n=6 pairs=8 radii=[2.0,8.0] model_depth=0",
    "rank_and_depth": "n=10 d=6 depth=8",
    "transport": "n=10 counts=[1,3,9] sorted=8 sort_eps=[0.1,0.01]",
    "implicit": "n=10 m=8 counts=[3,41]",
    "representations": "looks=[0,4] depth=1 width=8 n_train=60 n_look=60",
}


@pytest.fixture(scope="session")
def run_small() -> Callable[[str], Result]:
    """Runs a check by its name at a small size."""

    def run(name: str) -> Result:
        module = importlib.import_module(f"experiments.theory.{name}")
        options = next(value for key, value in vars(module).items() if key.lower() == name.replace("_", "") + "options")
        return module.run(parse_options(options, SMALL[name].split(), name))

    return run


@pytest.fixture
def without_column_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """The operator as it would be if its column steps did nothing: softmax, whatever the number of half-steps."""
    sinkhorn, get_normalizer = operator.sinkhorn, operator.get_normalizer
    monkeypatch.setattr(operator, "sinkhorn", lambda scores, n_iters, **masks: sinkhorn(scores, 1, **masks))
    monkeypatch.setattr(operator, "MOST_ITERS", operator.FIRST_ITERS)
    monkeypatch.setattr(
        operator,
        "get_normalizer",
        lambda name, **options: get_normalizer(
            name, **{key: 1 if key == "n_iters" else value for key, value in options.items()}
        ),
    )


@pytest.fixture(autouse=True)
def flush_denormals():
    """As the command does: numbers below 1e-308 make kernels at low temperature 50 times as slow."""
    torch.set_flush_denormal(True)
    yield
    torch.set_flush_denormal(False)
