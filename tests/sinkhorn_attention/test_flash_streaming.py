"""Streaming by fused attention calls, against the reference: on the CPU's, and on a GPU's where there is one.

On a machine without a GPU the calls of its kernels are checked with fake tensors, which know shapes and dtypes.
"""

import math

import pytest
import torch
from sinkhorn_attention import flash_streaming
from sinkhorn_attention.flash_streaming import flash_streaming_attention, fused_backward, fused_forward, refusal
from sinkhorn_attention.reference import sinkhorn_attention_reference
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"))]


def tokens(
    n: int, m: int, *lead: int, width: int = 8, value_width: int = 5, dtype: torch.dtype = torch.float64
) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(n, width), (m, width), (m, value_width)]
    normal = [torch.randn(*lead, *shape, generator=generator, dtype=torch.float64) for shape in shapes]
    return [tensor.to(dtype).requires_grad_() for tensor in normal]


def check(
    inputs: list[Tensor],
    n_iters: int,
    tolerance: float,
    *,
    scale: float = 0.3,
    detached: bool = False,
    masks: tuple[Tensor | None, Tensor | None] = (None, None),
    device: str = "cpu",
) -> None:
    """Value and gradients against the float64 reference of the same numbers, relative in norm."""
    here = [tensor.detach().to(device).requires_grad_() for tensor in inputs]
    exact = [tensor.detach().double().requires_grad_() for tensor in inputs]
    placed = [None if mask is None else mask.to(device) for mask in masks]
    out = flash_streaming_attention(*here, n_iters, scale, detached, *placed)[0]
    gradient = "detached" if detached else "unrolled"
    want = sinkhorn_attention_reference(*exact, n_iters, scale, None, *masks, None, gradient)
    arriving = torch.randn(want.shape, generator=torch.Generator().manual_seed(1)).to(inputs[0].dtype)
    got = [out, *torch.autograd.grad(out, here, arriving.to(device))]
    expected = [want, *torch.autograd.grad(want, exact, arriving.double())]
    for name, one, other in zip(("output", "query", "key", "value"), got, expected, strict=True):
        assert one.dtype == inputs[0].dtype
        error = (one.cpu().double() - other).norm()
        assert error <= tolerance * (other.norm() + 1e-3), f"{name}: off by {error:.2e} of {other.norm():.2e}"


@pytest.mark.parametrize("detached", [False, True])
@pytest.mark.parametrize("n_iters", [1, 2, 3, 4, 5, 21])
def test_exact_on_the_cpu(n_iters: int, detached: bool) -> None:
    check(tokens(7, 9, 2, 3), n_iters, 1e-12, detached=detached)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.float16, 2e-3), (torch.bfloat16, 1.2e-2)]
)
@pytest.mark.parametrize("n_iters", [1, 3, 4, 7])
@pytest.mark.parametrize("device", DEVICES)
def test_precision(device: str, n_iters: int, dtype: torch.dtype, tolerance: float) -> None:
    """Half precision rounds the coupling once, as flash attention does; the potentials' columns hold 24 bits."""
    query, key, value = tokens(70, 65, 2, 2, width=16, value_width=16, dtype=dtype)
    check([2 * query, key, value], n_iters, tolerance, scale=0.25, device=device)


def test_the_bias_in_half_precision_needs_its_three_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Potentials near 100, as keys far from the origin have: one bfloat16 column would round them by 0.2."""
    query, key, value = (t.detach() for t in tokens(70, 65, 1, 2, width=16, dtype=torch.bfloat16))
    key = key + 12 * torch.sign(key[..., :1, :])
    want = sinkhorn_attention_reference(query.double(), key.double(), value.double(), 4, 0.25)
    errors = []
    for columns in (3, 1):
        monkeypatch.setattr(flash_streaming, "_bias_columns", lambda dtype, columns=columns: columns)
        out = flash_streaming_attention(query, key, value, 4, 0.25, False, None, None)[0]
        errors.append((out.double() - want).norm() / want.norm())
    assert errors[0] < 1e-2
    assert errors[1] > 2 * errors[0]


@pytest.mark.parametrize("lead", [(), (3,), (2, 1, 3), (4, 2)])
@pytest.mark.parametrize(
    ("n", "m", "width", "value_width"), [(1, 1, 8, 5), (1, 6, 3, 9), (6, 1, 1, 1), (40, 33, 17, 24)]
)
def test_shapes(lead: tuple[int, ...], n: int, m: int, width: int, value_width: int) -> None:
    inputs = tokens(n, m, *lead, width=width, value_width=value_width)
    for n_iters in (3, 4):
        check(inputs, n_iters, 1e-10)


@pytest.mark.parametrize("scale", [-0.3, 0.0, 2.0])
def test_any_scale(scale: float) -> None:
    for n_iters in (3, 4):
        check(tokens(7, 9, 2, 1), n_iters, 1e-10, scale=scale)


def masks() -> tuple[Tensor, Tensor]:
    """n_valid / m_valid of 7/9, 3/4, and samples without queries, without keys and without either."""
    rows = torch.arange(7) < torch.tensor([7, 3, 0, 7, 0]).view(5, 1, 1)
    columns = torch.arange(9) >= torch.tensor([0, 5, 0, 9, 9]).view(5, 1, 1)
    return rows, columns


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("n_iters", [1, 2, 3, 4])
@pytest.mark.parametrize("device", DEVICES)
def test_masks(device: str, n_iters: int, dtype: torch.dtype) -> None:
    if device == "cuda" and dtype == torch.float64:
        pytest.skip("refused on CUDA")
    tolerance = {torch.float64: 1e-12, torch.float32: 3e-6, torch.float16: 3e-3, torch.bfloat16: 2e-2}[dtype]
    for detached in (False, True):
        inputs = tokens(7, 9, 5, 2, dtype=dtype)
        check(inputs, n_iters, tolerance, masks=masks(), detached=detached, device=device)
    rows, columns = masks()
    out = flash_streaming_attention(*inputs, n_iters, 0.3, False, rows, columns)[0]
    assert (out[2:] == 0).all()
    assert (out[1, :, 3:] == 0).all()


def test_what_stands_in_the_padding_is_not_read() -> None:
    rows, columns = (mask[:2] for mask in masks())
    results = []
    for garbage in (0.0, math.nan):
        inputs = [tensor.detach() for tensor in tokens(7, 9, 2, 2)]
        pairs = zip(inputs, (rows, columns, columns), strict=True)
        inputs = [t.masked_fill(~mask.unsqueeze(-1), garbage).requires_grad_() for t, mask in pairs]
        out = flash_streaming_attention(*inputs, 5, 0.3, False, rows, columns)[0]
        results.append([out, *torch.autograd.grad(out.square().sum(), inputs)])
    for clean, dirty in zip(*results, strict=True):
        assert torch.equal(clean, dirty)


@pytest.mark.parametrize("std", [30.0, 300.0])
@pytest.mark.parametrize("n_iters", [3, 4, 7])
def test_large_scores(n_iters: int, std: float) -> None:
    """In float64 exact; in float32 potentials of 1000 leave the exponents an error of 1e-4."""
    query, key, value = tokens(24, 24, 2, 2)
    check([std * query, key, value], n_iters, 1e-9, scale=8**-0.5)
    narrow = [tensor.detach().float() for tensor in (std * query, key, value)]
    out = flash_streaming_attention(*narrow, n_iters, 8**-0.5, False, None, None)[0]
    want = sinkhorn_attention_reference(*(t.double() for t in narrow), n_iters, 8**-0.5)
    assert (out.double() - want).norm() <= 1e-4 * want.norm()
    huge = [1e15 * tensor for tensor in narrow]
    assert flash_streaming_attention(*huge, n_iters, 1.0, False, None, None)[0].isfinite().all()


def test_saved_is_linear_in_the_tokens() -> None:
    """Inputs, output and two vectors for each pair of half-steps; no map of 100 x 90."""
    inputs, storages = tokens(100, 90, 1, 1, dtype=torch.float32), {}

    def note(tensor: Tensor) -> Tensor:
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        flash_streaming_attention(*inputs, 21, 0.3, False, None, None)
    bare = sum(tensor.untyped_storage().nbytes() for tensor in inputs) + 100 * 5 * 4
    # The tokens come as float64 storage converted to float32: their own storages are counted above.
    assert sum(storages.values()) <= bare + 11 * (100 + 90) * 4


def test_operator_is_registered_soundly() -> None:
    query, key, value = tokens(6, 7, 2, 3, dtype=torch.float32)
    mask = torch.ones(2, 1, 7, dtype=torch.bool)
    for arguments in ((None, None), (mask[..., :6], mask)):
        checks = ("test_schema", "test_autograd_registration", "test_faketensor")
        torch.library.opcheck(
            flash_streaming_attention, (query, key, value, 4, 0.3, False, *arguments), test_utils=checks
        )
    out = flash_streaming_attention(query, key, value, 3, 0.3, False, None, None)[0]
    (first,) = torch.autograd.grad(out.sum(), query, create_graph=True)
    with pytest.raises(NotImplementedError, match="streaming backend"):
        first.sum().backward()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_calls_of_the_gpu_kernels_have_their_shapes(dtype: torch.dtype) -> None:
    """Fake tensors: operator, arguments and shapes, without a GPU; the numbers are for a GPU to show."""
    with FakeTensorMode():
        query = torch.empty(2, 3, 50, 72, device="cuda", dtype=dtype)
        key = torch.empty(2, 3, 41, 72, device="cuda", dtype=dtype)
        out, logsumexp = fused_forward(query, key, key, 0.1)
        assert (out.shape, out.dtype) == (query.shape, dtype)
        assert (logsumexp.shape, logsumexp.dtype) == ((2, 3, 50), torch.float32)
        gradients = fused_backward(out, query, key, key, out, logsumexp, 0.1)
        assert [tuple(gradient.shape) for gradient in gradients] == [query.shape, key.shape, key.shape]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU: there is nothing to synchronise with")
def test_no_synchronisation() -> None:
    inputs = [tensor.detach().cuda().requires_grad_() for tensor in tokens(40, 33, 2, 2, dtype=torch.bfloat16)]
    arriving = torch.ones(2, 2, 40, 5, device="cuda", dtype=torch.bfloat16)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        flash_streaming_attention(*inputs, 5, 0.3, False, None, None)[0].backward(arriving)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_refusals() -> None:
    query = torch.zeros(2, 3, 4, dtype=torch.bfloat16)
    assert refusal(query, 64, 64, False, False) is None
    assert "no attn_bias" in str(refusal(query, 64, 64, True, False))
    assert "dropout_p=0" in str(refusal(query, 64, 64, False, True))
    assert refusal(query, 253, 8, False, False) is None
    assert "heads of width 248 at most (the width is 254)" in str(refusal(query, 8, 254, False, False))
    assert "a CUDA or CPU device" in str(refusal(query.to("meta"), 8, 8, False, False))
