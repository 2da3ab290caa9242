"""Small vision transformers trained on digits while one looks on: the same seed, softmax or Sinkhorn."""

from collections.abc import Sequence
from dataclasses import dataclass

import timm
import timm_sinkhorn  # noqa: F401  registers the models
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..data import mnist5k
from ..seeding import stream_seed

MEAN, STD = 0.1307, 0.3081


@dataclass
class Snapshot:
    """A model in the middle of its training.

    Attributes:
        step: optimiser steps so far.
        accuracy: on the digits that are looked at, a fraction of 1.
        layers: outputs of the embedding and of each block on those digits, (samples, tokens, width), float64.
    """

    step: int
    accuracy: float
    layers: list[Tensor]


def digits(folder: str, n_train: int, n_look: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Images (., 1, 28, 28) and labels to train on, and others to look at."""
    data = mnist5k.load(folder)
    order = torch.randperm(len(data["labels"]), generator=torch.Generator().manual_seed(0))
    images = ((torch.from_numpy(data["images"]).float() / 255 - MEAN) / STD).unsqueeze(1)[order]
    labels = torch.from_numpy(data["labels"]).long()[order]
    train, look = slice(0, n_train), slice(n_train, n_train + n_look)
    return images[train], labels[train], images[look], labels[look]


def build(normalizer: str, seed: int, depth: int, width: int) -> nn.Module:
    """A transformer on patches of 7, one head; the same seed gives the same weights whatever the normalizer."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(stream_seed("theory-weights", seed))
        model: nn.Module = timm.create_model(
            "sinkformer_vit_mnist", normalizer=normalizer, depth=depth, embed_dim=width, num_classes=10
        )
    return model


def outputs_of_layers(model: nn.Module, images: Tensor) -> tuple[list[Tensor], Tensor]:
    """Outputs of the embedding and of each block, and the logits."""
    kept: list[Tensor] = []
    blocks = list(model.blocks)  # type: ignore[arg-type]
    hooks = [blocks[0].register_forward_pre_hook(lambda module, arguments: kept.append(arguments[0]))]
    hooks += [block.register_forward_hook(lambda module, arguments, output: kept.append(output)) for block in blocks]
    try:
        with torch.no_grad():
            logits = model.eval()(images)
    finally:
        for hook in hooks:
            hook.remove()
    return [tensor.double() for tensor in kept], logits


def train(
    model: nn.Module, data: tuple[Tensor, Tensor, Tensor, Tensor], looks: Sequence[int], seed: int, batch: int = 50
) -> list[Snapshot]:
    """Trains with Adam at 2e-3 up to the last of `looks`, and looks at the model at each; the seed orders batches."""
    images, labels, others, truth = data
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    batches = torch.Generator().manual_seed(stream_seed("theory-batches", seed))
    found = []
    for step in range(max(looks) + 1):
        if step in looks:
            layers, logits = outputs_of_layers(model, others)
            found.append(Snapshot(step, float((logits.argmax(1) == truth).double().mean()), layers))
        chosen = torch.randint(len(images), (batch,), generator=batches)
        loss = F.cross_entropy(model.train()(images[chosen]), labels[chosen])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return found
