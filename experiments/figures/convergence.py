"""How far columns are from their targets after n_iters half-steps, for random scores and for those of a trained run."""

import argparse
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from sinkhorn_attention import Normalizer, marginal_error
from sinkhorn_attention.normalizers.scores import attention_scores
from sinkhorn_attention.reference import sinkhorn_reference
from torch import Tensor, nn

from ..errors import RunError
from ..evaluate import load_run
from ..seeding import generator
from .base import COLOURS, Drawn, styled

TITLE = "Marginal error against the number of half-steps, for random and for trained scores"
HALF_STEPS = (1, 3, 5, 7, 9, 11, 15, 21, 31, 51, 101)
MAPS = 16

Scores = tuple[Tensor, Tensor | None, Tensor | None]


def add_options(parser: argparse.ArgumentParser) -> None:
    """The figure's options."""
    parser.add_argument(
        "--run", type=Path, help="a finished run (default: of those under runs/, the one that finished last)"
    )
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="where to look for one (default: runs)")
    parser.add_argument("--data", help="folder of all data, where it has moved since the run")
    parser.add_argument("--tokens", type=int, default=64, help="queries and keys of the random scores (default: 64)")
    parser.add_argument(
        "--spreads", type=float, nargs="+", default=[1.0, 3.0, 10.0], help="standard deviations (default: 1 3 10)"
    )
    parser.add_argument("--seed", type=int, default=0)


def draw(options: argparse.Namespace) -> Drawn:
    """Draws the median of the maps' column errors, relative to the column target, and the range from least to largest.

    Raises:
        RunError: for an option out of range, or a run that cannot be loaded.
    """
    if options.tokens < 2 or not all(spread > 0 for spread in options.spreads):
        raise RunError("--tokens must be at least 2 and every number of --spreads positive")
    random = generator("figure-convergence", options.seed)
    families: dict[str, list[Scores]] = {}
    for spread in options.spreads:
        scores = spread * torch.randn(MAPS, options.tokens, options.tokens, generator=random, dtype=torch.float64)
        families[f"random, std {spread:g}"] = [(scores, None, None)]
    run, note = options.run or newest_run(options.runs), ""
    if run is None:
        note = f" No finished run under {options.runs}: trained scores are not shown; name a run with --run."
    else:
        families |= trained_scores(run, options.data)
    rows: list[tuple[object, ...]] = []
    ends = []
    with styled():
        figure = Figure(figsize=(6.4, 4.4), layout="constrained")
        axes = figure.subplots()
        for index, (name, batches) in enumerate(families.items()):
            errors = column_errors(batches)
            low, middle, high = errors.min(1).values, errors.median(1).values, errors.max(1).values
            colour, trained = COLOURS[index % len(COLOURS)], not name.startswith("random")
            # A logarithmic axis has no place for an error of zero.
            seen = [value.clamp(min=1e-17).numpy() for value in (low, middle, high)]
            axes.fill_between(HALF_STEPS, seen[0], seen[2], color=colour, alpha=0.15, linewidth=0)
            axes.plot(HALF_STEPS, seen[1], "o-" if trained else "s--", color=colour, markersize=4, label=name)
            rows += [
                (name, steps, errors.shape[1], *(repr(float(value[at])) for value in (low, middle, high)))
                for at, steps in enumerate(HALF_STEPS)
            ]
            ends.append(f"{name}: {float(middle[0]):.2g} after 1 half-step, {float(middle[7]):.2g} after 21")
        axes.set(xscale="log", yscale="log", xlabel="half-steps (n_iters)", ylabel="relative column error")
        axes.set_xticks(HALF_STEPS, [str(steps) for steps in HALF_STEPS], fontsize=8)
        axes.minorticks_off()
        figure.legend(loc="outside lower center", ncols=2, fontsize=8)
    source = f" Trained scores from {run}." if run is not None else ""
    words = f"Largest deviation of a column's sum from its target, median over maps. {'; '.join(ends)}.{source}{note}"
    return Drawn(figure, ("scores", "n_iters", "maps", "least", "median", "largest"), rows, words)


def column_errors(batches: list[Scores]) -> Tensor:
    """Largest relative deviation of a column sum from its target, (half-steps, maps), after each of `HALF_STEPS`.

    Rows sum to 1 after an odd half-step, so the columns hold the whole error.
    """
    found = []
    for steps in HALF_STEPS:
        values = []
        for scores, query_mask, key_mask in batches:
            coupling = sinkhorn_reference(scores.double(), steps, query_mask, key_mask)
            queries = scores.shape[-2] if query_mask is None else query_mask.sum(-1)
            keys = scores.shape[-1] if key_mask is None else key_mask.sum(-1)
            target = torch.as_tensor(queries / keys, dtype=torch.float64)
            values.append((marginal_error(coupling, query_mask, key_mask).columns / target).flatten())
        found.append(torch.cat(values))
    return torch.stack(found)


def trained_scores(folder: Path, data: str | None) -> dict[str, list[Scores]]:
    """The scores of every attention layer of a finished run, on a few samples of its training split.

    Returns:
        By layer; layers of a single query are left out, whose only coupling is uniform.
    """
    run = load_run(folder, data=data)
    *inputs, _ = next(iter(run.data.eval_loader("train")))
    with torch.no_grad(), captured_scores(run.model) as log:
        run.model(*(tensor[:4] for tensor in inputs))
    name = run.config["attention"]["name"]
    kept = {layer: calls for layer, calls in log.items() if calls and calls[0][0].shape[-2] > 1}
    if not kept:
        raise RunError(f"{folder}: the model has no attention layer with more than one query")
    return {f"trained, {name}, {layer}": calls for layer, calls in kept.items()}


@contextmanager
def captured_scores(model: nn.Module) -> Iterator[dict[str, list[Scores]]]:
    """Keeps the scores and masks that every normalizer of a model is called with, by its module's name."""
    normalizers = {name: module for name, module in model.named_modules() if isinstance(module, Normalizer)}
    log: dict[str, list[Scores]] = {name: [] for name in normalizers}
    try:
        for name, module in normalizers.items():
            module.__dict__["attend"] = _capturing(module, log[name])
        yield log
    finally:
        for module in normalizers.values():
            module.__dict__.pop("attend", None)


def _capturing(module: Normalizer, log: list[Scores]) -> Any:
    attend = module.attend
    signature = inspect.signature(attend)

    def capture(*args: Any, **kwargs: Any) -> Tensor:
        given = signature.bind(*args, **kwargs).arguments
        masks = given.get("query_mask"), given.get("key_mask")
        log.append(
            (attention_scores(given["query"], given["key"], given.get("scale"), given.get("attn_bias"), *masks), *masks)
        )
        return attend(*args, **kwargs)

    return capture


def newest_run(runs: Path) -> Path | None:
    """Of the finished runs of the Lightning runner under a folder the newest; None where there is none."""
    results = [path for path in runs.glob("*/*/result.json") if any(path.parent.glob("checkpoints/step*.ckpt"))]
    return max(results, key=lambda path: path.stat().st_mtime).parent if results else None
