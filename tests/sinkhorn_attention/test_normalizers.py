"""The registry, and every normalizer against a plain formula in float64, in value and in gradient."""

import copy
import itertools
import math
import pickle

import pytest
import torch
from sinkhorn_attention import Normalizer, get_normalizer, list_normalizers, marginal_error, register_normalizer
from sinkhorn_attention.normalizers import choose_normalizer
from sinkhorn_attention.reference import sinkhorn_reference
from torch import Tensor

pytestmark = [
    pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled"),
]

OPTIONS = {name: {"n_iters": 3} for name in ("sinkhorn", "sinkhorn_l2", "unbalanced_sinkhorn")}
OPTIONS |= {"esp": {"temperature": 0.3}}
ALL = ["l2", "sigmoid", "sinkhorn", "sinkhorn_l2", "softmax", "unbalanced_sinkhorn"]
ROW_WISE = ["l2", "sigmoid", "softmax"]
FROM_SCORES = ["sigmoid", "sinkhorn", "softmax", "unbalanced_sinkhorn"]
#: Those that take no bias, too; the formulas of these are in test_lot.py and test_esp.py.
EVERY = [*ALL, "esp", "lot", "lot, learned masses"]


def build(name: str) -> Normalizer:
    if name.startswith("lot"):
        learned = {"learned_masses": "learned" in name}
        normalizer = get_normalizer("lot", n_iters=5, num_pivots=3, head_dim=4, num_heads=2, **learned).double()
        with torch.no_grad():  # pivots far apart and unequal masses
            for parameter in normalizer.parameters():
                parameter.copy_(torch.linspace(-3, 3, parameter.numel()).sin().view_as(parameter))
        return normalizer
    return get_normalizer(name, **OPTIONS.get(name, {}))


def distances(query: Tensor, key: Tensor) -> Tensor:
    return (query.unsqueeze(-2) - key.unsqueeze(-3)).square().sum(-1)


def unbalanced(scores: Tensor, n_iters: int, rho: float = 10.0) -> Tensor:
    """The published loop: total mass 1, the column step damped, then the number of queries as a factor."""
    n, m = scores.shape[-2:]
    f, g = scores.new_zeros(n, 1), scores.new_zeros(1, m)
    for step in range(n_iters):
        if step % 2 == 0:
            f = math.log(1 / n) - (scores + g).logsumexp(-1, keepdim=True)
        else:
            g = rho / (rho + 1) * (math.log(1 / m) - (scores + f).logsumexp(-2, keepdim=True))
    return n * (scores + f + g).exp()


def plain(name: str, query: Tensor, key: Tensor, scale: float, bias: Tensor | float = 0.0) -> Tensor:
    """The map by its formula, without masks."""
    dots = scale * query @ key.transpose(-1, -2) + bias
    squares = -0.5 * scale * distances(query, key) + bias
    return {
        "softmax": lambda: dots.softmax(-1),
        "l2": lambda: squares.softmax(-1),
        "sigmoid": lambda: 1 / (1 + (math.log(key.shape[-2]) - dots).exp()),
        "sinkhorn": lambda: sinkhorn_reference(dots, 3),
        "sinkhorn_l2": lambda: sinkhorn_reference(squares, 3),
        "unbalanced_sinkhorn": lambda: unbalanced(dots, 3),
    }[name]()


def tokens(n: int = 5, m: int = 7, d: int = 4, d_v: int = 3, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Query, key, value for two samples with two heads."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(n, d), (m, d), (m, d_v)]
    return [torch.randn(2, 2, *shape, dtype=torch.float64, generator=generator).to(dtype) for shape in shapes]


def same(have: Tensor, want: Tensor, inputs: list[Tensor], tolerance: float = 1e-9) -> None:
    """Equal value, and equal gradient of a sum with fixed weights."""
    torch.testing.assert_close(have, want, rtol=tolerance, atol=tolerance, check_dtype=False)
    weights = torch.linspace(-1, 1, want.numel(), dtype=want.dtype).reshape(want.shape)
    got = torch.autograd.grad((have * weights).sum(), inputs, retain_graph=True)
    expected = torch.autograd.grad((want * weights).sum(), inputs, retain_graph=True)
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


def test_registry() -> None:
    assert set(ALL) <= set(list_normalizers())
    assert list_normalizers() == sorted(list_normalizers())


@pytest.mark.parametrize("name", ALL)
def test_head_dim_and_num_heads_are_always_taken(name: str) -> None:
    normalizer = get_normalizer(name, head_dim=4, num_heads=2)
    assert (normalizer.head_dim, normalizer.num_heads) == (4, 2)


@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        ("sofmax", {}, "unknown normalizer 'sofmax'; there are .*, softmax"),
        ("softmax", {"n_iters": 3}, "'softmax' has no option n_iters; it has none"),
        ("sinkhorn", {"iters": 3}, "'sinkhorn' has no option iters; it has n_iters, gradient, backend"),
        ("sinkhorn", {"n_iters": 0}, "n_iters must be an integer >= 1"),
        ("sinkhorn_l2", {"n_iters": 2.0}, "n_iters must be an integer >= 1"),
        ("unbalanced_sinkhorn", {"n_iters": -1}, "n_iters must be an integer >= 1"),
        ("unbalanced_sinkhorn", {"rho": 0.0}, "rho must be positive"),
        ("unbalanced_sinkhorn", {"rho": math.nan}, "rho must be positive"),
        ("unbalanced_sinkhorn", {"rho": "5"}, r"'unbalanced_sinkhorn' does not take these options, {'rho': '5'}"),
        ("esp", {"temperature": "1"}, r"'esp' does not take these options, {'temperature': '1'}"),
        ("sigmoid", {"bias": "5"}, "bias must be a finite number, or None for -log m, got '5'"),
        ("sigmoid", {"bias": math.nan}, "bias must be a finite number"),
        ("sinkhorn", {"gradient": "exact"}, "gradient must be one of unrolled, detached, implicit, got 'exact'"),
        ("sinkhorn", {"backend": "cuda"}, "backend must be one of auto, reference, .* got 'cuda'"),
        ("sinkhorn_l2", {"gradient": None}, "gradient must be one of .* got None"),
        ("lot", {"backend": "cuda", "head_dim": 4, "num_heads": 2}, "backend must be one of .* got 'cuda'"),
    ],
)
def test_refusals(name: str, options: dict[str, float], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        get_normalizer(name, **options)


SPELLED = [("lot", {"n_iters": 3, "num_pivots": 2, "learned_masses": True}), ("sinkhorn_l2", {"gradient": "detached"})]


@pytest.mark.parametrize(("name", "options"), [*OPTIONS.items(), *SPELLED, ("esp", {"power": 1.0}), ("softmax", {})])
def test_one_normalizer_three_spellings(name: str, options: dict[str, object]) -> None:
    sizes = {"head_dim": 4, "num_heads": 2}
    by_name = get_normalizer(name, **sizes, **options)
    assert options.items() <= by_name.options.items()
    for other in ({"name": name, **options}, by_name):
        made = get_normalizer(other, **sizes)
        assert made is not by_name
        assert type(made) is type(by_name)
        assert made.options == by_name.options
        assert [p.shape for p in made.parameters()] == [p.shape for p in by_name.parameters()]
        assert not {*map(id, made.parameters())} & {*map(id, by_name.parameters())}


def test_a_normalizer_is_made_again_for_other_heads_and_as_it_is_now() -> None:
    given = get_normalizer("lot", num_pivots=3, head_dim=4, num_heads=2)
    given.n_iters = 7
    assert get_normalizer(given, head_dim=5, num_heads=1).pivot.shape == (1, 3, 5)
    again = get_normalizer(given)
    assert (again.pivot.shape, again.n_iters) == ((2, 3, 4), 7)


def test_a_class_that_is_not_registered_and_has_no_sizes() -> None:
    class Fixed(Normalizer):
        def __init__(self, factor: float = 1.0) -> None:
            super().__init__()
            self.factor = factor

    made = get_normalizer(Fixed(2.0), head_dim=4, num_heads=2)
    assert (type(made), made.factor, made.head_dim, repr(made)) == (Fixed, 2.0, 4, "Fixed(factor=2.0)")


@pytest.mark.parametrize(
    ("normalizer", "options", "says"),
    [
        ({"name": "sinkhorn", "n_iters": 3}, {"n_iters": 5}, "n_iters is given twice: as 3 and as 5"),
        (get_normalizer("sinkhorn"), {"n_iters": 3}, "n_iters is given twice: as 5 and as 3"),
        ({"name": "softmax", "n_iters": 3}, {}, "'softmax' has no option n_iters"),
        ({"n_iters": 3}, {}, "normalizer must be a name, a mapping of 'name' and options .* got {'n_iters': 3}"),
        (None, {}, "normalizer must be a name, .* got None"),
        ({"name": ["sinkhorn"]}, {}, r"unknown normalizer \['sinkhorn'\]"),
    ],
)
def test_a_mapping_is_refused_as_its_parts_are(normalizer: object, options: dict[str, int], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        get_normalizer(normalizer, **options)


def test_no_count_leaves_it_to_the_default() -> None:
    none = {"name": "sinkhorn", "n_iters": None}
    assert get_normalizer(none).n_iters == 5
    assert choose_normalizer(none, default={"name": "sinkhorn", "n_iters": 21}) == {"name": "sinkhorn", "n_iters": 21}
    assert choose_normalizer("softmax", default={"name": "sinkhorn", "n_iters": 21}) == {"name": "softmax"}


def test_a_name_is_not_taken_twice() -> None:
    with pytest.raises(
        ValueError, match=r"'softmax' is registered already, by sinkhorn_attention\.normalizers\.softmax"
    ):

        @register_normalizer("softmax")
        class Softmax(Normalizer):
            pass

    assert type(get_normalizer("softmax")).__module__ == "sinkhorn_attention.normalizers.softmax"


@pytest.mark.parametrize("name", ["l2", "sinkhorn_l2"])
def test_distances_do_not_come_from_scores(name: str) -> None:
    with pytest.raises(NotImplementedError, match="needs queries and keys"):
        build(name).from_scores(torch.zeros(2, 2))


@pytest.mark.parametrize("shape", [(5, 7), (6, 6), (1, 4), (4, 1)])
@pytest.mark.parametrize("name", ALL)
def test_formula(name: str, shape: tuple[int, int]) -> None:
    query, key, value = (tensor.requires_grad_() for tensor in tokens(*shape))
    bias = torch.randn(2, 1, *shape, dtype=torch.float64).requires_grad_()
    want = plain(name, query, key, 0.7, bias)
    normalizer = build(name)
    same(normalizer.coupling(query, key, scale=0.7, attn_bias=bias), want, [query, key, bias])
    out = normalizer.attend(query, key, value, scale=0.7, attn_bias=bias)
    same(out, want @ value, [query, key, value, bias])


@pytest.mark.parametrize("name", ALL)
def test_default_scale(name: str) -> None:
    query, key, value = (tensor.requires_grad_() for tensor in tokens())
    same(build(name).attend(query, key, value), plain(name, query, key, 0.5) @ value, [query, key, value])


@pytest.mark.parametrize("name", FROM_SCORES)
def test_from_scores(name: str) -> None:
    query, key, _ = (tensor.requires_grad_() for tensor in tokens())
    scores = query @ key.transpose(-1, -2)
    same(build(name).from_scores(scores), plain(name, query, key, 1.0), [query, key])
    assert build(name).from_scores(scores.bfloat16()).dtype == torch.bfloat16


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", EVERY)
def test_padding_equals_the_tokens_alone(name: str, side: str) -> None:
    valid_n, valid_m = 4, 3
    query, key, value = tokens(6, 8)
    query_mask, key_mask = torch.zeros(2, 1, 6, dtype=torch.bool), torch.zeros(2, 1, 8, dtype=torch.bool)
    rows = slice(6 - valid_n, None) if side == "left" else slice(None, valid_n)
    columns = slice(8 - valid_m, None) if side == "left" else slice(None, valid_m)
    query_mask[..., rows] = True
    key_mask[..., columns] = True
    alone = [query[..., rows, :], key[..., columns, :], value[..., columns, :]]
    alone = [tensor.clone().requires_grad_() for tensor in alone]
    padded = []
    for tensor, where, mask in zip(alone, (rows, columns, columns), (query_mask, key_mask, key_mask), strict=True):
        whole = torch.full((2, 2, mask.shape[-1], tensor.shape[-1]), torch.nan, dtype=torch.float64)
        whole[..., where, :] = tensor
        padded.append(whole)
    normalizer = build(name)
    parameters = list(normalizer.parameters())
    masks = {"query_mask": query_mask, "key_mask": key_mask}
    coupling = normalizer.coupling(*padded[:2], **masks)
    same(coupling[..., rows, columns], normalizer.coupling(*alone[:2]), alone[:2] + parameters)
    outside = ~(query_mask.unsqueeze(-1) & key_mask.unsqueeze(-2)).expand_as(coupling)
    assert (coupling[outside] == 0).all()
    out = normalizer.attend(*padded, **masks)
    out.register_hook(lambda arriving: arriving.masked_fill(~query_mask.unsqueeze(-1), torch.nan))
    same(out[..., rows, :], normalizer.attend(*alone), alone + parameters)
    assert (out.masked_select(~query_mask.unsqueeze(-1)) == 0).all()


@pytest.mark.parametrize("polarity", ["bool", "float"])
@pytest.mark.parametrize("name", ALL)
def test_support(name: str, polarity: str) -> None:
    """A row and a column without support count as masked; the rest equals the same tokens without them."""
    query, key, value = (tensor.requires_grad_() for tensor in tokens(6, 6))
    keep = torch.ones(6, 6, dtype=torch.bool)
    keep[2], keep[:, 4] = False, False
    rows, columns = [0, 1, 3, 4, 5], [0, 1, 2, 3, 5]
    bias = keep if polarity == "bool" else torch.zeros(6, 6, dtype=torch.float64).masked_fill(~keep, -torch.inf)
    normalizer = build(name)
    out = normalizer.attend(query, key, value, attn_bias=bias)
    alone = normalizer.attend(query[..., rows, :], key[..., columns, :], value[..., columns, :])
    same(out[..., rows, :], alone, [query, key, value])
    assert (out[..., 2, :] == 0).all()
    coupling = normalizer.coupling(query, key, attn_bias=bias)
    assert (coupling.masked_select(~keep) == 0).all()
    torch.testing.assert_close(coupling @ value, out)


@pytest.mark.parametrize(
    ("name", "hides"),
    [*itertools.product(EVERY, ("queries", "keys", "both")), *((name, "bias") for name in ALL)],
)
def test_sample_with_nothing_valid(name: str, hides: str) -> None:
    query, key, value = (tensor.requires_grad_() for tensor in tokens(5, 5))
    mask = torch.tensor([[False] * 5, [True] * 5]).unsqueeze(1)
    options = {"query_mask": mask, "key_mask": mask}
    if hides == "bias":
        options = {"attn_bias": torch.zeros(2, 1, 5, 5).masked_fill(~mask.unsqueeze(-1), -math.inf)}
    elif hides != "both":
        del options["key_mask" if hides == "queries" else "query_mask"]
    normalizer = build(name)
    inputs = [query, key, value, *normalizer.parameters()]
    with torch.autograd.detect_anomaly(check_nan=True):
        out = normalizer.attend(query, key, value, **options)
        coupling = normalizer.coupling(query, key, **options)
        gradients = torch.autograd.grad(out.square().sum() + coupling.square().sum(), inputs)
    assert (out[0] == 0).all()
    assert (coupling[0] == 0).all()
    torch.testing.assert_close(out[1], normalizer.attend(query[1], key[1], value[1]))
    assert all(gradient.isfinite().all() for gradient in gradients)
    for gradient in gradients[:3]:
        assert (gradient[0] == 0).all()
        assert (gradient[1] != 0).any()


@pytest.mark.parametrize("name", EVERY)
def test_permutations(name: str) -> None:
    """Permuting queries permutes rows, permuting keys permutes columns."""
    query, key, _ = tokens(6, 7)
    generator = torch.Generator().manual_seed(1)
    rows, columns = torch.randperm(6, generator=generator), torch.randperm(7, generator=generator)
    moved = build(name).coupling(query[..., rows, :], key[..., columns, :])
    torch.testing.assert_close(moved, build(name).coupling(query, key)[..., rows, :][..., columns])


@pytest.mark.parametrize(("n", "m"), [(0, 3), (3, 0), (0, 0)])
@pytest.mark.parametrize("name", EVERY)
def test_no_tokens(name: str, n: int, m: int) -> None:
    query, key, value = tokens(n, m)
    out = build(name).attend(query, key, value)
    assert out.shape == (2, 2, n, 3)
    assert (out == 0).all()
    assert build(name).coupling(query, key).shape == (2, 2, n, m)


@pytest.mark.parametrize("name", ALL)
def test_one_sample_does_not_see_its_batch(name: str) -> None:
    query, key, value = tokens(dtype=torch.float32)
    out = build(name).attend(query, key, value)
    for sample in range(2):
        for head in range(2):
            alone = build(name).attend(query[sample, head], key[sample, head], value[sample, head])
            torch.testing.assert_close(out[sample, head], alone, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", EVERY)
def test_masks_are_not_aligned_with_the_heads(name: str) -> None:
    """(batch, tokens) beside (batch, heads, tokens, width), with as many samples as heads, would run silently."""
    query, key, value = tokens(5, 5)
    mask = torch.ones(2, 5, dtype=torch.bool)
    with pytest.raises(ValueError, match=r"key_mask must be .* got shape"):
        build(name).attend(query, key, value, key_mask=mask)
    with pytest.raises(ValueError, match=r"query_mask must be .* got shape"):
        build(name).coupling(query, key, query_mask=mask)
    with pytest.raises(ValueError, match="key_mask must be a boolean"):
        build(name).attend(query, key, value, key_mask=torch.ones(5))


@pytest.mark.parametrize("name", ALL)
def test_what_does_not_fit_is_refused(name: str) -> None:
    """The fused softmax of torch reads past the end of short values, and an integer mask would be added as a bias."""
    query, key, value = tokens(5, 5)
    normalizer = build(name)
    with pytest.raises(ValueError, match="value must have as many tokens as key, 5, got 3"):
        normalizer.attend(query, key, value[..., :3, :])
    with pytest.raises(ValueError, match="key must have the query's width 4, got 3"):
        normalizer.attend(query, key[..., :3], value)
    with pytest.raises(ValueError, match="key must have the query's width 4, got 3"):
        normalizer.coupling(query, key[..., :3])
    with pytest.raises(ValueError, match="leading dimensions that broadcast"):
        normalizer.coupling(query, key[:, :1].expand(2, 3, 5, 4))
    for bias, says in (
        (torch.ones(5, 5, dtype=torch.long), "must be floating .* or boolean"),
        (torch.ones(5, 5, dtype=torch.uint8), "must be floating .* or boolean"),
        (torch.ones(4, 5), r"must be broadcastable to \(2, 2, 5, 5\)"),
    ):
        with pytest.raises(ValueError, match=f"attn_bias {says}"):
            normalizer.attend(query, key, value, attn_bias=bias)
        with pytest.raises(ValueError, match=f"attn_bias {says}"):
            normalizer.coupling(query, key, attn_bias=bias)


@pytest.mark.parametrize("name", ALL)
def test_causal_bias(name: str) -> None:
    """Refused where a row depends on later rows; where it does not, later tokens are not seen."""
    query, key, value = tokens(5, 5)
    causal = torch.ones(5, 5, dtype=torch.bool).tril()
    normalizer = build(name)
    assert normalizer.row_wise == (name in ROW_WISE)
    if name not in ROW_WISE:
        with pytest.raises(ValueError, match="cannot be causal"):
            normalizer.attend(query, key, value, attn_bias=causal)
        with pytest.raises(ValueError, match="cannot be causal"):
            normalizer.coupling(query, key, attn_bias=causal)
        return
    before = normalizer.attend(query, key, value, attn_bias=causal)
    query, key, value = (torch.cat([t[..., :4, :], 3 + t[..., 4:, :]], -2) for t in (query, key, value))
    if name != "l2":  # distances are taken from the mean key: equal up to rounding
        assert torch.equal(normalizer.attend(query, key, value, attn_bias=causal)[..., :4, :], before[..., :4, :])
    torch.testing.assert_close(normalizer.attend(query, key, value, attn_bias=causal)[..., :4, :], before[..., :4, :])


@pytest.mark.parametrize("name", EVERY)
def test_dropout_acts_on_the_final_map(name: str) -> None:
    """With the identity for values the output is the map: entries are 0 or the map's over 1 - p."""
    query, key, _ = tokens(40, 40, dtype=torch.float32)
    value, normalizer = torch.eye(40).expand(2, 2, 40, 40), build(name).float()
    torch.manual_seed(0)
    out = normalizer.attend(query, key, value, dropout_p=0.25)
    dropped = out == 0
    coupling = normalizer.coupling(query, key)
    torch.testing.assert_close(out[~dropped], (coupling / 0.75)[~dropped], rtol=1e-4, atol=1e-6)
    assert 0.22 < dropped.float().mean() < 0.28


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ALL)
def test_low_precision(name: str, dtype: torch.dtype) -> None:
    """Scores of standard deviation 8: finite gradients, and an output as good as the inputs' precision."""
    query, key, value = (tensor.requires_grad_() for tensor in tokens(64, 64, d=16, dtype=dtype))
    out = build(name).attend(query, key, value, scale=2.0)
    assert out.dtype == dtype
    wide = [tensor.detach().double().requires_grad_() for tensor in (query, key, value)]
    want = plain(name, wide[0], wide[1], 2.0) @ wide[2]
    torch.testing.assert_close(out.double(), want, rtol=0.05, atol=0.05)
    gradients = torch.autograd.grad(out.float().sum(), [query, key, value])
    assert all(gradient.isfinite().all() for gradient in gradients)
    torch.testing.assert_close(gradients[2].double(), torch.autograd.grad(want.sum(), wide[2])[0], rtol=0.05, atol=0.1)


@pytest.mark.parametrize("name", ALL)
def test_autocast_with_mixed_dtypes(name: str) -> None:
    """Normalised queries and keys are float32 under autocast while values are bfloat16; so is a float32 bias."""
    query, key, value = tokens(8, 8, d=16, dtype=torch.float32)
    bias = torch.randn(8, 8)
    want = plain(name, query.double(), key.double(), 2.0, bias.double())
    with torch.autocast("cpu", torch.bfloat16):
        out = build(name).attend(query, key, value.bfloat16(), scale=2.0, attn_bias=bias)
        coupling = build(name).coupling(query, key, scale=2.0, attn_bias=bias)
    torch.testing.assert_close(out.double(), want @ value.double(), rtol=0.05, atol=0.05)
    torch.testing.assert_close(coupling.double(), want, rtol=1e-4, atol=1e-5)


def test_distances_under_autocast() -> None:
    """The keys' column reaches -1e3 here; in bfloat16 it would be off by 4, in the exponent."""
    query, key, value = tokens(8, 8, d=16, dtype=torch.float32)
    key = 8 * key
    query = key + query
    want = plain("l2", query.double(), key.double(), 0.5) @ value.double()
    with torch.autocast("cpu", torch.bfloat16):
        out = build("l2").attend(query, key, value, scale=0.5)
    torch.testing.assert_close(out.double(), want, rtol=1e-3, atol=1e-3)


def test_a_finite_bias_stays_finite_in_half_precision() -> None:
    """-1e9 lies beyond float16; as -inf it would leave the row without support and give 0."""
    query, key, value = tokens(3, 3, dtype=torch.float16)
    out = build("softmax").attend(query, key, value, attn_bias=torch.full((3, 3), -1e9))
    want = plain("softmax", query.double(), key.double(), 0.5) @ value.double()
    torch.testing.assert_close(out.double(), want, rtol=0.01, atol=0.01)


@pytest.mark.parametrize("name", ["l2", "sinkhorn_l2"])
def test_distances_far_from_the_origin(name: str) -> None:
    """|q|^2 and |k|^2 near 4e6: their difference from 2 q.k, without centring, would be rounding alone in float32."""
    query, key, value = (tensor.requires_grad_() for tensor in tokens(8, 8, dtype=torch.float32))
    wide = [tensor.detach().double().requires_grad_() for tensor in (query, key, value)]
    want = plain(name, wide[0], wide[1], 0.5) @ wide[2]
    out = build(name).attend(query + 1024.0, key + 1024.0, value, scale=0.5)
    torch.testing.assert_close(out.double(), want, rtol=1e-3, atol=1e-3)
    gradients = torch.autograd.grad(out.sum(), [query, key, value])
    for got, expected in zip(gradients, torch.autograd.grad(want.sum(), wide), strict=True):
        torch.testing.assert_close(got.double(), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", ["l2", "sinkhorn_l2"])
def test_distances_with_keys_far_apart(name: str) -> None:
    """Scores down to -1e6 * scale: finite, with each query on the key it stands beside."""
    key = 1000.0 * torch.randn(8, 4, generator=torch.Generator().manual_seed(3))
    query = (key + 0.01).requires_grad_()
    out = build(name).attend(query, key, torch.eye(8))
    torch.testing.assert_close(out, torch.eye(8))
    assert torch.autograd.grad(out.square().sum(), query)[0].isfinite().all()


def test_key_terms_matter_at_finite_n_iters() -> None:
    """Proposition 1 holds in the limit only: without the keys' column `sinkhorn_l2` would be `sinkhorn`."""
    query, key, _ = tokens(6, 6)
    gap = [
        (
            get_normalizer("sinkhorn_l2", n_iters=n).coupling(query, key)
            - get_normalizer("sinkhorn", n_iters=n).coupling(query, key)
        )
        .abs()
        .max()
        for n in (1, 3, 301)
    ]
    assert gap[0] > 0.05
    assert gap[1] > 1e-3
    assert gap[2] < 1e-12


@pytest.mark.parametrize(("n", "m"), [(6, 6), (4, 7)])
@pytest.mark.parametrize("name", ["sinkhorn", "sinkhorn_l2"])
def test_sums_of_the_sinkhorn_maps(name: str, n: int, m: int) -> None:
    query, key, _ = tokens(n, m)
    for n_iters in (1, 2, 3, 4, 201):
        error = marginal_error(get_normalizer(name, n_iters=n_iters).coupling(query, key))
        assert (error.rows.max() < 1e-12) == (n_iters % 2 == 1)
        assert (error.columns.max() < 1e-12) == (n_iters % 2 == 0 or n_iters == 201)


def test_sums_of_the_row_wise_maps() -> None:
    query, key, _ = tokens(4, 7)
    for name in ("l2", "softmax"):
        torch.testing.assert_close(build(name).coupling(query, key).sum(-1), torch.ones(2, 2, 4, dtype=torch.float64))
    flat = build("sigmoid").coupling(0 * query, key)
    torch.testing.assert_close(flat.sum(-1), torch.full((2, 2, 4), 7 / 8, dtype=torch.float64))
    torch.testing.assert_close(flat.sum(-2), torch.full((2, 2, 7), 4 / 8, dtype=torch.float64))
    fixed = get_normalizer("sigmoid", bias=0.0).coupling(0 * query, key)
    torch.testing.assert_close(fixed, torch.full((2, 2, 4, 7), 0.5, dtype=torch.float64))


@pytest.mark.parametrize(("n", "m"), [(6, 6), (4, 7)])
def test_sums_of_the_unbalanced_map(n: int, m: int) -> None:
    query, key, _ = tokens(n, m)
    odd = marginal_error(get_normalizer("unbalanced_sinkhorn", n_iters=201).coupling(query, key))
    assert odd.rows.max() < 1e-12
    assert 1e-3 < odd.columns.max() < 0.2
    scores = query @ key.transpose(-1, -2)
    balanced = get_normalizer("unbalanced_sinkhorn", n_iters=7, rho=math.inf).from_scores(scores)
    torch.testing.assert_close(balanced, sinkhorn_reference(scores, 7))
    first = get_normalizer("unbalanced_sinkhorn", n_iters=1).from_scores(scores)
    torch.testing.assert_close(first, scores.softmax(-1))


@pytest.mark.parametrize("shape", [(5, 7), (6, 6), (7, 5)])
@pytest.mark.parametrize("n_iters", [1, 2, 3, 4, 7])
def test_unbalanced_at_every_count(n_iters: int, shape: tuple[int, int]) -> None:
    query, key, _ = (tensor.requires_grad_() for tensor in tokens(*shape))
    scores = query @ key.transpose(-1, -2)
    for rho in (0.5, 10.0):
        have = get_normalizer("unbalanced_sinkhorn", n_iters=n_iters, rho=rho).from_scores(scores)
        same(have, unbalanced(scores, n_iters, rho), [query, key])


@pytest.mark.parametrize("name", FROM_SCORES)
def test_large_scores(name: str) -> None:
    scores = torch.randn(2, 6, 6, generator=torch.Generator().manual_seed(0))
    for size in (30.0, 1e30):
        given = (size * scores).requires_grad_()
        coupling = build(name).from_scores(given)
        assert coupling.isfinite().all()
        assert torch.autograd.grad(coupling.square().sum(), given)[0].isfinite().all()


def test_gradient_option_reaches_the_map() -> None:
    """`coupling` must not be differentiated otherwise than `attend`."""
    query, key, value = (tensor.requires_grad_() for tensor in tokens())
    detached = get_normalizer("sinkhorn", n_iters=3, gradient="detached")
    same(detached.coupling(query, key) @ value, detached.attend(query, key, value), [query, key, value])
    unrolled = torch.autograd.grad(build("sinkhorn").attend(query, key, value).square().sum(), query)[0]
    assert (
        torch.autograd.grad(detached.attend(query, key, value).square().sum(), query)[0] - unrolled
    ).abs().max() > 1e-3


@pytest.mark.parametrize("name", list_normalizers())
def test_meta_device(name: str) -> None:
    """Shapes and dtypes come out where there is no data."""
    normalizer = get_normalizer(name, head_dim=4, num_heads=2)
    inputs = tokens()
    mask = torch.ones(2, 1, 7, dtype=torch.bool)
    expected = normalizer.attend(*inputs, key_mask=mask), normalizer.coupling(*inputs[:2], key_mask=mask)
    query, key, value, mask = (tensor.to("meta") for tensor in (*inputs, mask))
    normalizer.to("meta")
    found = normalizer.attend(query, key, value, key_mask=mask), normalizer.coupling(query, key, key_mask=mask)
    assert [(t.shape, t.dtype, t.is_meta) for t in found] == [(t.shape, t.dtype, True) for t in expected]


@pytest.mark.parametrize("name", ALL)
def test_copies(name: str) -> None:
    query, key, value = tokens(dtype=torch.float32)
    want = build(name).attend(query, key, value)
    for twin in (copy.deepcopy(build(name)), pickle.loads(pickle.dumps(build(name)))):
        assert torch.equal(twin.attend(query, key, value), want)
    assert not build(name).state_dict()


def test_given_scores_have_the_gradient_that_was_asked_for() -> None:
    """At convergence the implicit derivative is the unrolled one; the detached one is not."""
    torch.manual_seed(0)
    weights, mask = torch.randn(2, 6, 6, dtype=torch.float64), torch.arange(6) < 5
    gradients = {}
    for gradient in ("unrolled", "implicit", "detached"):
        scores = torch.linspace(-1, 1, 72, dtype=torch.float64).sin().view(2, 6, 6).requires_grad_()
        normalizer = get_normalizer("sinkhorn", n_iters=201, gradient=gradient)
        coupling = normalizer.from_scores(scores, query_mask=mask, key_mask=mask)
        (gradients[gradient],) = torch.autograd.grad((coupling * weights).sum(), scores)
        assert (gradients[gradient][:, 5] == 0).all()
    torch.testing.assert_close(gradients["implicit"], gradients["unrolled"], rtol=1e-8, atol=1e-10)
    assert (gradients["detached"] - gradients["unrolled"]).abs().max() > 1e-3
    # One half-step is far from convergence: the derivative at convergence differs from softmax's, or is refused.
    scores = torch.zeros(1, 6, 6, dtype=torch.float64, requires_grad=True)
    (uniform,) = torch.autograd.grad(
        get_normalizer("sinkhorn", n_iters=1, gradient="implicit").from_scores(scores)[0, 0, 0], scores
    )
    (softmax,) = torch.autograd.grad(get_normalizer("sinkhorn", n_iters=1).from_scores(scores)[0, 0, 0], scores)
    assert (uniform - softmax).abs().max() > 1e-3
