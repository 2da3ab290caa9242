"""Seconds of a training step of the suite's models, and the share of attention in it."""

from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from sinkhorn_attention import Normalizer
from torch import Tensor, nn

from .timing import interleaved

MODELS = ("sinkformer_vit_catsdogs", "set_sinkformer_modelnet40", "pct_sinkformer_modelnet40", "sinkformer_sentiment")
#: Half-steps by the name in the table; softmax is torch's own fused attention.
VARIANTS = {"softmax": None, "T=3": 3, "T=5": 5, "T=21": 21}


def time_steps(model: str, variants: list[str], repeats: int, quick: bool = False) -> dict[str, Any]:
    """Seconds per step (forward, backward, Adam) for each variant, and of the calls of attention in it.

    Attention is timed alone, forward and backward, on tensors of the shapes, layouts and masks that the model gave it.

    Returns:
        {"step": {variant: samples}, "attention": {variant: samples}}.
    """
    steps: dict[str, Callable[[], object]] = {}
    calls: dict[str, Callable[[], object]] = {}
    for variant in variants:
        step, calls_of_step = training_step(model, VARIANTS[variant], quick)
        with recorded_calls() as recorded:
            step()
        steps[variant], calls[variant] = step, calls_of_step(recorded)
    return {"step": interleaved(steps, repeats), "attention": interleaved(calls, repeats)}


def training_step(
    name: str, n_iters: int | None, quick: bool
) -> tuple[Callable[[], object], Callable[[list[dict[str, Any]]], Callable[[], object]]]:
    """One step of a model on one batch of random data, and what makes the calls of attention that were recorded in it.

    Raises:
        ValueError: for a model without a benchmark.
    """
    torch.manual_seed(0)
    model, inputs, classes = build(name, n_iters, quick)
    model.train()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    labels = torch.randint(classes, (len(inputs[0]),))

    def step() -> float:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(*inputs), labels)
        loss.backward()
        optimizer.step()
        return loss.item()

    return step, replay


def build(name: str, n_iters: int | None, quick: bool) -> tuple[nn.Module, tuple[Tensor, ...], int]:
    """A model with softmax (None) or Sinkhorn attention, its inputs as in its experiment, and its number of classes."""
    batch = 2 if quick else 16
    attention: dict[str, Any] = {"normalizer": "softmax"} if n_iters is None else {"n_iters": n_iters}
    if name == "sinkformer_vit_catsdogs":
        import timm
        import timm_sinkhorn  # noqa: F401  (registers the model)

        image = 64 if quick else 224
        vit = timm.create_model(name, img_size=image, **attention)
        return vit, (torch.randn(batch, 3, image, image),), 2
    if name in ("set_sinkformer_modelnet40", "pct_sinkformer_modelnet40"):
        import pyg_sinkhorn

        points = 64 if quick else (500 if name.startswith("set") else 1024)
        return pyg_sinkhorn.create_model(name, **attention), (torch.randn(batch, points, 3),), 40
    if name == "sinkformer_sentiment":
        return _sentiment(n_iters), (_sentences(batch, 32 if quick else 256),), 2
    raise ValueError(f"no benchmark of a step of {name!r}; there are {', '.join(MODELS)}")


def _sentences(batch: int, longest: int) -> Tensor:
    """Symbols (batch, longest) of sentences of a quarter of the length and more, padded on the right."""
    lengths = torch.linspace(longest // 4, longest, batch).long().unsqueeze(1)
    return torch.randint(4, 1000, (batch, longest)).masked_fill(torch.arange(longest) >= lengths, 1)


class _Logits(nn.Module):
    """fairseq's classifier as a model from symbols to logits."""

    HEAD = "benchmark"

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        model.register_classification_head(self.HEAD, num_classes=2)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.model(tokens, features_only=True, classification_head_name=self.HEAD)[0]
        return logits


def _sentiment(n_iters: int | None) -> nn.Module:
    import fairseq_sinkhorn  # noqa: F401  (registers the architecture)
    from fairseq import models
    from fairseq.data import Dictionary

    dictionary = Dictionary()
    for symbol in range(1000):
        dictionary.add_symbol(str(symbol))
    attention = {"attention_normalizer": "softmax"} if n_iters is None else {"sinkhorn_iters": n_iters}
    namespace = Namespace(arch="sinkformer_sentiment_imdb", **attention)
    return _Logits(models.build_model(namespace, SimpleNamespace(source_dictionary=dictionary)))


@contextmanager
def recorded_calls() -> Iterator[list[dict[str, Any]]]:
    """Notes the arguments of every normalizer's `attend` inside the block, tensors without their history."""
    calls: list[dict[str, Any]] = []
    patched: list[tuple[Any, Any]] = []

    def detached(argument: Any) -> Any:
        return argument.detach() if isinstance(argument, Tensor) else argument

    def wrap(original: Any) -> Any:
        def attend(self: Normalizer, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            tokens = [detached(tensor) for tensor in (query, key, value)]
            options = {name: detached(argument) for name, argument in kwargs.items()}
            calls.append({"normalizer": self, "tokens": tokens, "positional": args, "options": options})
            out: Tensor = original(self, query, key, value, *args, **kwargs)
            return out

        return attend

    classes: list[Any] = [Normalizer, *_subclasses(Normalizer)]
    for cls in classes:
        if "attend" in vars(cls):
            patched.append((cls, vars(cls)["attend"]))
            cls.attend = wrap(vars(cls)["attend"])
    try:
        yield calls
    finally:
        for cls, original in patched:
            cls.attend = original


def _subclasses(cls: Any) -> list[Any]:
    children: list[Any] = cls.__subclasses__()
    return [below for child in children for below in (child, *_subclasses(child))]


def replay(calls: list[dict[str, Any]]) -> Callable[[], object]:
    """Makes the recorded calls of attention again, forward and backward."""

    def run() -> None:
        for call in calls:
            tokens = [tensor.requires_grad_() for tensor in call["tokens"]]
            out = call["normalizer"].attend(*tokens, *call["positional"], **call["options"])
            torch.autograd.grad(out, tokens, torch.ones_like(out))

    return run
