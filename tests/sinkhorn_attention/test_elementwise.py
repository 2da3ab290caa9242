"""Sigmoid attention's engine against `from_scores` in float64, in value and in gradient."""

import math

import pytest
import torch
from sinkhorn_attention import blockwise, elementwise, get_normalizer
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

PRECISIONS = [torch.float64, torch.float32]


def random_mask(*shape: int, seed: int = 0, keep: float = 0.7) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed)) < keep


@pytest.mark.parametrize("dtype", PRECISIONS)
@pytest.mark.parametrize("bias", [None, 0.0, -3.5, 40.0])
@pytest.mark.parametrize(("n", "m"), [(7, 7), (5, 9), (40, 3)])
def test_matches_the_definition(make_problem, matches_definition, n: int, m: int, bias: float | None, dtype) -> None:
    matches_definition(get_normalizer("sigmoid", bias=bias), make_problem(n, m), dtype)


@pytest.mark.parametrize("dtype", PRECISIONS)
@pytest.mark.parametrize("std", [30, 100, 300])
def test_large_logits(make_problem, matches_definition, std: float, dtype) -> None:
    """Scores that float32 holds exactly, so that the map alone is compared."""
    problem = make_problem(12, 12, scale=0.25)
    problem = problem._replace(query=(problem.query * math.sqrt(2) * std).round(), key=(problem.key * 2).round() / 2)
    matches_definition(get_normalizer("sigmoid"), problem, dtype)


@pytest.mark.parametrize("n_hidden", [0, 2])
def test_the_bias_counts_the_keys_that_are_seen(n_hidden: int) -> None:
    """By masks, and by columns of -inf: at scores of 0 a row that sees all m keys sums to m / (m + 1)."""
    query, key, value = torch.zeros(2, 3, 5, 4), torch.zeros(2, 3, 8, 4), torch.ones(2, 3, 8, 1)
    key_mask = torch.arange(8) < 6
    bias = torch.zeros(2, 1, 5, 8)
    bias[1, ..., :n_hidden] = -math.inf
    bias[0, ..., 0, 3] = -math.inf  # hidden from one query alone: the key counts
    output = get_normalizer("sigmoid").attend(query, key, value, attn_bias=bias, key_mask=key_mask)
    torch.testing.assert_close(output[1], torch.full((3, 5, 1), (6 - n_hidden) / (7 - n_hidden)))
    torch.testing.assert_close(output[0, :, 1:], torch.full((3, 4, 1), 6 / 7))
    torch.testing.assert_close(output[0, :, 0], torch.full((3, 1), 5 / 7))


@pytest.mark.parametrize("dtype", PRECISIONS)
def test_a_causal_bias(make_problem, matches_definition, dtype) -> None:
    causal = torch.zeros(7, 7).double().masked_fill(torch.ones(7, 7, dtype=torch.bool).triu(1), -math.inf)
    matches_definition(get_normalizer("sigmoid"), make_problem(7, 7, attn_bias=causal), dtype)
    matches_definition(get_normalizer("sigmoid"), make_problem(7, 7, attn_bias=causal == 0), dtype)
    rows = {"query_mask": random_mask(2, 3, 7), "key_mask": random_mask(2, 1, 7, seed=1)}
    matches_definition(get_normalizer("sigmoid"), make_problem(7, 7, attn_bias=causal, **rows), dtype)


@pytest.mark.parametrize("dtype", PRECISIONS)
def test_a_large_map_is_passed_in_blocks_of_rows(make_problem, matches_definition, monkeypatch, dtype) -> None:
    monkeypatch.setattr(elementwise, "SLAB_BYTES", 1)
    monkeypatch.setattr(blockwise, "BLOCK_BYTES", 1)  # 16 rows
    borrowed, honest = set(), elementwise.borrow
    monkeypatch.setattr(
        elementwise, "borrow", lambda *shapes, **given: borrowed.update(shapes) or honest(*shapes, **given)
    )
    masks = {"query_mask": random_mask(2, 3, 40), "key_mask": random_mask(2, 1, 9, seed=1), "dropout_p": 0.2}
    bias = torch.randn(3, 40, 9).double().masked_fill(~random_mask(3, 40, 9), -math.inf)
    bias[1, :, 2] = bias[2, 20] = -math.inf
    for options in ({}, masks, {"attn_bias": bias}, {"attn_bias": bias, **masks}, {"attn_bias": bias[:, :1], **masks}):
        matches_definition(get_normalizer("sigmoid"), make_problem(40, 9, **options), dtype)
    assert {rows for _, rows, _ in borrowed} == {16, 8}


@pytest.mark.filterwarnings("ignore:User provided device_type of 'cuda'")
@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
@pytest.mark.parametrize("bias", [None, 0.5])
def test_other_devices_hold_their_own_scratch(bias: float | None) -> None:
    """Shapes and devices alone: a buffer on the CPU or a look at the data would raise."""
    with FakeTensorMode(), torch.no_grad():
        query, key, value = (torch.empty(2, 3, size, 8, device="cuda") for size in (5, 7, 7))
        mask, keep = torch.ones(2, 1, 7, dtype=torch.bool, device="cuda"), torch.ones(2, 3, 5, 7, device="cuda")
        attn_bias = torch.empty(3, 5, 7, device="cuda")
        for options in ((None, None, None, None, 0.0), (attn_bias, None, mask, keep == 1, 0.1)):
            output, *state = elementwise.attention_forward(query, key, value, bias, 0.5, *options)
            assert output.device.type == "cuda"
            arguments = output, output, query, key, value, *state, bias, 0.5, *options
            gradients = elementwise.attention_backward(*arguments, options[0] is not None)
            assert [gradient.device.type for gradient in gradients] == ["cuda"] * 4


def test_the_count_matters(make_problem, matches_definition, monkeypatch) -> None:
    """A deliberately wrong engine, whose bias misses a key, is caught."""
    honest = elementwise._log_support
    monkeypatch.setattr(elementwise, "_log_support", lambda *given: (honest(*given).exp() - 1).log())
    with pytest.raises(AssertionError, match="off by"):
        matches_definition(get_normalizer("sigmoid"), make_problem(7, 7))
