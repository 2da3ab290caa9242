"""A model that is no transformer, for `model.target`."""

from torch import nn


def make(num_classes: int, img_size: int, bias: bool) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(img_size**2, num_classes, bias=bias))
