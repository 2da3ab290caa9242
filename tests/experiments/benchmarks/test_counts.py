"""Kernels and map passes of the portable engine on a device: a budget that it has to stay within."""

import csv
import math

import pytest
import torch

from experiments.benchmarks.__main__ import main
from experiments.benchmarks.counts import HEADS, TOKENS, Counting, count_autograd, count_portable
from experiments.benchmarks.published import published_attention


def test_what_is_counted() -> None:
    one, other = torch.randn(3, 8, 8), torch.randn(3, 8, 8)
    with Counting(3 * 8 * 8) as counts:
        one + other  # two reads and a write
        one.mul_(2.0)  # one of each
        torch.empty_like(one).copy_(other)
        one.transpose(1, 2).sum(2)
        torch.bmm(one[:, :, :2], other[:, :2])
    assert (counts.kernels, counts.passes, counts.looks) == (5, 3 + 2 + 2 + 1 + 1, 0)
    with Counting(3 * 8 * 8) as counts:
        bool(one.amax() > 0)
        one.nonzero()
    assert counts.looks == 2


@pytest.mark.parametrize("n_iters", [1, 2, 3, 4, 5, 21])
def test_a_call_stays_within_its_budget(n_iters: int) -> None:
    found = count_portable(n_iters)
    assert sum(found.kernels) <= 4 * n_iters + 60
    assert sum(found.passes) <= 2 * n_iters + 25
    assert found.looks == (1, 1), "one look at the data, forward and backward each"
    if n_iters % 2:
        assert sum(found.passes) < sum(count_autograd(published_attention, n_iters).passes)


MASK = torch.arange(TOKENS) < TOKENS - 5
OPTIONS = {
    "masks": {"query_mask": MASK, "key_mask": MASK},
    "bias": {"attn_bias": torch.zeros(HEADS, TOKENS, TOKENS)},
    "dropout": {"dropout_keep": torch.ones(1, HEADS, TOKENS, TOKENS, dtype=torch.bool), "dropout_p": 0.1},
    "damping": {"damping": 0.5},
}


@pytest.mark.parametrize(
    ("option", "passes", "kernels"), [("masks", 6, 65), ("bias", 24, 60), ("dropout", 9, 8), ("damping", 0, 10)]
)
def test_what_options_add(option: str, passes: float, kernels: int) -> None:
    plain, found = count_portable(5), count_portable(5, **OPTIONS[option])
    assert sum(found.passes) - sum(plain.passes) <= passes
    assert sum(found.kernels) - sum(plain.kernels) <= kernels
    assert found.looks == (1, 1)


def test_nothing_is_looked_at_while_a_graph_is_captured() -> None:
    assert count_portable(5, captured=True).looks == (0, 0)


def test_the_command(tmp_path, capsys) -> None:
    assert main(["counts", "--output", str(tmp_path)]) == 0
    assert "published arithmetic" in capsys.readouterr().out
    with open(tmp_path / "cpu" / "counts.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    (row,) = [row for row in rows if row["engine"] == "portable, on a device" and row["half-steps"] == "5"]
    found = count_portable(5)
    assert math.isclose(float(row["passes, forward"]), found.passes[0], abs_tol=0.5)
