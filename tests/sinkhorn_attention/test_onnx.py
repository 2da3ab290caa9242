"""Models export to ONNX without a word of the user, by both exporters and from a program exported before."""

import logging
from pathlib import Path
from typing import Any

import onnxruntime
import pytest
import timm
import timm_sinkhorn  # noqa: F401  (registers the models)
import torch
from sinkhorn_attention import MultiheadAttention, get_normalizer, sinkhorn
from torch import Tensor, nn

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning"),
]
#: By the exporters that they all go through; each export takes seconds, whatever it holds.
SINKHORN: list[tuple[str, dict[str, Any]]] = [
    ("sinkhorn", {"n_iters": 5}),
    ("sinkhorn", {"n_iters": 4}),
    ("sinkhorn", {"n_iters": 3, "backend": "streaming"}),
    ("sinkhorn", {"n_iters": 11, "gradient": "implicit"}),
    ("unbalanced_sinkhorn", {}),
]
OTHERS: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in ("softmax", "sigmoid", "l2", "sinkhorn_l2", "esp")),
    ("lot", {"head_dim": 8, "num_heads": 3}),
]


class Attend(nn.Module):
    """Attention by each of some normalizers, with padding."""

    def __init__(self, normalizers: list[tuple[str, dict[str, Any]]]) -> None:
        super().__init__()
        self.normalizers = nn.ModuleList([get_normalizer(name, **options) for name, options in normalizers])

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        mask = torch.tensor([True, True, True, True, False, True])
        masks = {"query_mask": mask, "key_mask": mask}
        return torch.stack([normalizer.attend(query, key, value, **masks) for normalizer in self.normalizers])


class Coupling(nn.Module):
    def forward(self, scores: Tensor) -> Tensor:
        return sinkhorn(scores, 4)


def assert_exports(module: nn.Module, inputs: tuple[Tensor, ...], way: str, folder: Path) -> None:
    """The exported graph gives the model's numbers in onnxruntime."""
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    file = folder / "model.onnx"
    if way == "torch.export":
        torch.onnx.export(torch.export.export(module, inputs), (), file, verbose=False)
    elif way == "program":
        torch.onnx.export(module, inputs, file, dynamo=True, verbose=False)
    else:
        torch.onnx.export(module, inputs, file, dynamo=False)
    session = onnxruntime.InferenceSession(file)
    given = {place.name: tensor.numpy() for place, tensor in zip(session.get_inputs(), inputs, strict=True)}
    got, want = session.run(None, given)[0], module(*inputs)
    want = want[0] if isinstance(want, tuple) else want
    torch.testing.assert_close(torch.from_numpy(got), want.detach(), rtol=1e-4, atol=2e-6)


def tokens() -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(2, 3, 6, 8, generator=generator) for _ in range(3))


@pytest.mark.parametrize(
    ("normalizers", "way"),
    [
        *((each, way) for each in (SINKHORN, OTHERS) for way in ("program", "trace")),
        (SINKHORN[1:], "torch.export"),
    ],
)
def test_normalizers(tmp_path: Path, normalizers: list[tuple[str, dict[str, Any]]], way: str) -> None:
    torch.manual_seed(0)
    assert_exports(Attend(normalizers).eval(), tokens(), way, tmp_path)


@pytest.mark.parametrize("way", ["program", "trace", "torch.export"])
def test_modules(tmp_path: Path, way: str) -> None:
    torch.manual_seed(0)
    assert_exports(Coupling(), (torch.randn(2, 5, 6),), way, tmp_path)
    attention = MultiheadAttention(16, 2, batch_first=True, n_iters=3).eval()
    assert_exports(attention, (torch.randn(2, 5, 16),) * 3, way, tmp_path)


@pytest.mark.parametrize("way", ["program", "trace", "torch.export"])
def test_a_vision_model(tmp_path: Path, way: str) -> None:
    torch.manual_seed(0)
    model = timm.create_model("sinkformer_vit_mnist", n_iters=3).eval()
    size = model.patch_embed.img_size
    assert_exports(model, (torch.randn(2, model.patch_embed.proj.in_channels, *size),), way, tmp_path)
