"""Expected sliced plans: the formula slice by slice, marginals, hard sorting; masks are in test_normalizers.py."""

import math

import ot
import pytest
import torch
from sinkhorn_attention import get_normalizer, list_normalizers
from torch import Tensor

pytestmark = [
    pytest.mark.filterwarnings("ignore:Sparse invariant checks"),
]


def tokens(n: int = 5, m: int = 5, d: int = 3, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(n, d), (m, d), (m, 4)]
    return [torch.randn(2, 2, *shape, dtype=torch.float64, generator=generator).to(dtype) for shape in shapes]


def by_slices(query: Tensor, key: Tensor, scale: float, temperature: float, power: float, sharpness: float) -> Tensor:
    """The map of one head (n, d), (m, d), from the algorithm's text; the monotone plan is POT's."""
    x, y = scale * query, scale * key
    n, m = len(x), len(y)
    line = [torch.arange(size, dtype=torch.float64).unsqueeze(1) for size in (n, m)]
    monotone = ot.emd_1d(*line)
    plans, costs = [], []
    for coordinate in range(x.shape[1]):
        order = []
        for points in (x[:, coordinate], y[:, coordinate]):
            ordered = points.sort(descending=True)[0]
            order.append((-((ordered[:, None] - points[None]).abs() ** power) / temperature).softmax(1))
        plans.append(order[0].T @ monotone @ order[1])
        costs.append(((x[:, None] - y[None]).square().sum(-1) * plans[-1]).sum())
    weights = (-sharpness * torch.stack(costs)).softmax(0)
    return n * (weights[:, None, None] * torch.stack(plans)).sum(0)


def same(have: Tensor, want: Tensor, inputs: list[Tensor]) -> None:
    torch.testing.assert_close(have, want, rtol=1e-9, atol=1e-10)
    weights = torch.linspace(-1, 1, want.numel(), dtype=want.dtype).reshape(want.shape)
    pairs = [torch.autograd.grad((out * weights).sum(), inputs, retain_graph=True) for out in (have, want)]
    for got, expected in zip(*pairs, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("options", [{"temperature": 0.3, "power": 1.0, "sharpness": 2.0}, {"temperature": 0.5}])
@pytest.mark.parametrize("shape", [(5, 5), (4, 7), (7, 4), (1, 3)])
def test_formula(shape: tuple[int, int], options: dict[str, float]) -> None:
    query, key, value = (tensor.requires_grad_() for tensor in tokens(*shape))
    normalizer = get_normalizer("esp", **options)
    settings = {"temperature": 1e-3, "power": 2.0, "sharpness": 0.1, **options}
    heads = [by_slices(query[b, h], key[b, h], 0.7, **settings) for b in range(2) for h in range(2)]
    want = torch.stack(heads).unflatten(0, (2, 2))
    same(normalizer.coupling(query, key, scale=0.7), want, [query, key])
    same(normalizer.attend(query, key, value, scale=0.7), want @ value, [query, key, value])


@pytest.mark.parametrize(("n", "m"), [(6, 6), (4, 7)])
def test_marginals(n: int, m: int) -> None:
    """Exact where sorting is hard; where it is soft, the mass is still right and the sums are not."""
    query, key, _ = tokens(n, m)
    hard = get_normalizer("esp", temperature=1e-9).coupling(query, key)
    torch.testing.assert_close(hard.sum(-1), torch.ones_like(hard.sum(-1)), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(hard.sum(-2), torch.full_like(hard.sum(-2), n / m), rtol=1e-9, atol=1e-9)
    soft = get_normalizer("esp", temperature=1.0).coupling(query, key)
    torch.testing.assert_close(soft.sum((-2, -1)), torch.full((2, 2), float(n), dtype=torch.float64))
    assert (soft.sum(-1) - 1).abs().max() > 1e-2


def test_hard_sorting_matches_ranks() -> None:
    """One slice, hard: the i-th smallest query gives all its weight to the i-th smallest key."""
    query, key, _ = tokens(6, 6, d=1)
    coupling = get_normalizer("esp", temperature=1e-9).coupling(query, key)
    ranks = [tensor.squeeze(-1).argsort(-1).argsort(-1) for tensor in (query, key)]
    torch.testing.assert_close(coupling, (ranks[0].unsqueeze(-1) == ranks[1].unsqueeze(-2)).double())


def test_cheap_slices_weigh_more() -> None:
    """Slice 0 sorts queries beside their own keys, slice 1 in reverse: a sharp weighting takes the first."""
    line = torch.linspace(0, 1, 5, dtype=torch.float64)
    query, key = torch.stack([line, line], -1), torch.stack([line, line.flip(0)], -1)
    for sharpness, weight in ((0.0, 0.5), (1e4, 1.0)):
        normalizer = get_normalizer("esp", temperature=1e-9, sharpness=sharpness)
        coupling = normalizer.coupling(3 * query, 3 * key * torch.tensor([1.0, 0.5], dtype=torch.float64))
        torch.testing.assert_close(coupling.diagonal()[0], torch.tensor(weight, dtype=torch.float64))


def test_gradient() -> None:
    query, key, _ = (tensor[0, 0].clone().requires_grad_() for tensor in tokens(4, 5))
    normalizer = get_normalizer("esp", temperature=0.4, sharpness=1.0)
    assert torch.autograd.gradcheck(lambda q, k: normalizer.coupling(q, k), (query, key))


def test_low_precision() -> None:
    query, key, value = tokens(8, 8, dtype=torch.bfloat16)
    normalizer = get_normalizer("esp", temperature=0.3)
    assert normalizer.coupling(query, key).dtype == torch.float32
    want = normalizer.attend(query.double(), key.double(), value.double())
    torch.testing.assert_close(normalizer.attend(query, key, value).double(), want, rtol=0.02, atol=0.02)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"temperature": 0.0}, "temperature and power"),
        ({"power": -1.0}, "power"),
        ({"sharpness": math.nan}, "sharpness"),
    ],
)
def test_refused_options(options: dict[str, float], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        get_normalizer("esp", **options)


def test_a_bias_is_refused() -> None:
    query, key, value = tokens()
    assert "esp" in list_normalizers()
    with pytest.raises(ValueError, match="no scores that attn_bias"):
        get_normalizer("esp").attend(query, key, value, attn_bias=torch.zeros(5, 5))
    with pytest.raises(ValueError, match="key_mask must be"):
        get_normalizer("esp").attend(query, key, value, key_mask=torch.ones(2, 5, dtype=torch.bool))
