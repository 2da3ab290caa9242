"""Every backend's name reaches the operator, and a model is tried where it will be trained."""

from types import SimpleNamespace
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from sinkhorn_attention import engines
from sinkhorn_attention.engines import PORTABLE, domains

from experiments.config import compose, resolve
from experiments.errors import RunError
from experiments.runners import lightning
from experiments.runners.run_dir import RunDir
from tests.experiments.data.test_cats_dogs import kaggle  # noqa: F401  a fixture
from tests.experiments.test_every_key import BASES, data  # noqa: F401  a fixture and small runs
from tests.experiments.test_point_clouds import archive  # noqa: F401

EXPERIMENTS = ("mnist_patches", "shapes_set", "modelnet40_pct", "cats_dogs_vit")


def prepared(experiment: str, folder: Any, runs: Any, *more: str) -> Any:
    words = [f"experiment={experiment}", *BASES[experiment], f"paths.data={folder}", f"paths.runs={runs}", *more]
    config = resolve(compose(words))
    return lightning.prepare(config, RunDir.of(config))


class OnADevice:
    """An engine of which a GPU is asked for, and the portable one's work as it is done there."""

    name = "triton"

    def __init__(self, calls: list[torch.Size]) -> None:
        self.calls = calls

    def __call__(self, problem: Any) -> torch.Tensor:
        self.calls.append(problem.like.shape)
        return PORTABLE(problem)


@pytest.mark.parametrize("backend", ["auto", "triton", "streaming", "portable", "dense", "reference"])
@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_every_backend_goes_through_the_set_up(
    data,  # noqa: F811
    tmp_path,
    monkeypatch,
    experiment: str,
    backend: str,
) -> None:
    calls: list[torch.Size] = []
    if backend == "triton":
        monkeypatch.setitem(engines._OPERATORS, "triton", OnADevice(calls))
        monkeypatch.setattr("sinkhorn_attention.functional.operator_of", engines._OPERATORS.__getitem__)
    monkeypatch.setattr(domains, "is_asynchronous", lambda device: True)
    plan = prepared(experiment, data, tmp_path, f"attention.backend={backend}")
    assert plan.config["attention"]["backend"] == backend
    assert bool(calls) == (backend == "triton")


def test_a_backend_that_is_not_for_the_runs_device_is_named_before_anything_is_trained(data, tmp_path) -> None:  # noqa: F811
    with pytest.raises(RunError, match=r"^model: .*backend='triton' needs tensors on a CUDA device .*backend='auto'"):
        prepared("mnist_patches", data, tmp_path, "attention.backend=triton")
    assert not list(tmp_path.glob("*/*"))


def test_a_model_is_tried_on_the_runs_own_device(data, tmp_path, monkeypatch) -> None:  # noqa: F811
    """On the meta device, which stands for another one here."""
    seen = []

    def run(self: Any, *inputs: torch.Tensor) -> torch.Tensor:
        seen.append((inputs[0].device.type, {parameter.device.type for parameter in self.parameters()}))
        return inputs[0].new_zeros(len(inputs[0]), 10)

    trainer = L.Trainer

    def on_meta(**settings: Any) -> Any:
        made = trainer(**settings)
        monkeypatch.setattr(type(made.strategy), "root_device", torch.device("meta"))
        return made

    monkeypatch.setattr(lightning, "L", SimpleNamespace(Trainer=on_meta, seed_everything=L.seed_everything))
    monkeypatch.setattr("timm.models.vision_transformer.VisionTransformer.forward", run)
    plan = prepared("mnist_patches", data, tmp_path)
    assert seen == [("meta", {"meta"})]
    assert {parameter.device.type for parameter in plan.module.parameters()} == {"cpu"}
