"""Measures of a map against hand-made ones, and the recorder: right numbers, and no trace of it in the model."""

import copy
import math
import pickle
import threading
import warnings

import pytest
import torch
from sinkhorn_attention import (
    MultiheadAttention,
    Normalizer,
    attention_entropy,
    column_sums,
    convert,
    diagnostics,
    get_normalizer,
    marginal_error,
    record_attention,
    sinkhorn,
)
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

PADDING = torch.tensor([[0, 0, 0, 0, 0], [0, 0, 0, 1, 1]], dtype=torch.bool)
NAMES = ["layers.0.self_attn", "layers.1.self_attn"]


def encoder(dropout: float = 0.0, normalizer: str = "sinkhorn", **options: object) -> nn.TransformerEncoder:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=dropout)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    convert(model, normalizer, **options)
    return model


def sequences() -> Tensor:
    return torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(1)).requires_grad_()


def plain(model: nn.Module) -> bool:
    """Whether no method of a normalizer is replaced."""
    names = ("attend", "coupling", "from_scores")
    return not any(name in m.__dict__ for m in model.modules() if isinstance(m, Normalizer) for name in names)


def test_measures_of_known_maps() -> None:
    coupling = torch.tensor([[0.5, 0.5, 0.0], [1.0, 0.0, 0.0]])
    torch.testing.assert_close(column_sums(coupling), torch.tensor([1.5, 0.5, 0.0]))
    torch.testing.assert_close(attention_entropy(coupling), torch.tensor([math.log(2), 0.0]))
    torch.testing.assert_close(attention_entropy(7 * coupling), torch.tensor([math.log(2), 0.0]))
    torch.testing.assert_close(attention_entropy(torch.full((4, 8), 1 / 8)), torch.full((4,), math.log(8)))
    assert (attention_entropy(torch.zeros(2, 3)) == 0).all()
    error = marginal_error(coupling)
    assert error.rows == 0
    torch.testing.assert_close(error.columns, torch.tensor(1.5 - 2 / 3))
    torch.testing.assert_close(marginal_error(2 * coupling).rows, torch.tensor(1.0))


def test_measures_leave_masked_tokens_out() -> None:
    query_mask, key_mask = torch.tensor([True, True, False, True]), torch.tensor([False, True, True, True, True, False])
    coupling = sinkhorn(torch.randn(2, 4, 6, dtype=torch.float64), 401, query_mask=query_mask, key_mask=key_mask)
    error = marginal_error(coupling, query_mask, key_mask)
    assert error.rows.shape == error.columns.shape == (2,)
    assert max(error.rows.max(), error.columns.max()) < 1e-12
    assert marginal_error(coupling).rows.min() == 1
    torch.testing.assert_close(column_sums(coupling)[:, 1:5], torch.full((2, 4), 3 / 4, dtype=torch.float64))
    assert (attention_entropy(coupling)[:, 2] == 0).all()


@pytest.mark.parametrize("shape", [(0, 3), (3, 0), (0, 0)])
def test_measures_without_tokens(shape: tuple[int, int]) -> None:
    empty = torch.zeros(2, *shape)
    assert marginal_error(empty).columns.tolist() == [0.0, 0.0]
    assert marginal_error(empty).rows.tolist() == [1.0 if shape == (3, 0) else 0.0] * 2
    assert attention_entropy(empty).shape == (2, shape[0])
    assert column_sums(empty).shape == (2, shape[1])


@pytest.mark.parametrize("mask", [torch.tensor([1, 1, 0], dtype=torch.uint8), torch.ones(3)])
def test_integer_masks_are_refused(mask: Tensor) -> None:
    with pytest.raises(ValueError, match="key_mask must be boolean, True = takes part, got"):
        marginal_error(torch.eye(3), key_mask=mask)


def test_measures_sum_in_float32() -> None:
    """2,000 bfloat16 entries of 1/2000 summed in bfloat16 stop at a fraction of 1."""
    coupling = torch.full((2000, 2000), 1 / 2000).bfloat16()
    assert marginal_error(coupling).columns < 5e-3
    assert column_sums(coupling).dtype == torch.float32


@pytest.mark.parametrize("normalizer", ["softmax", "sinkhorn", "l2", "sinkhorn_l2", "sigmoid", "unbalanced_sinkhorn"])
def test_records_are_the_maps(normalizer: str) -> None:
    """What is recorded of `attend` is what is measured on the map that `need_weights` returns."""
    torch.manual_seed(0)
    layer = MultiheadAttention(8, 2, batch_first=True, normalizer=normalizer)
    x = sequences()
    weights = layer(x, x, x, PADDING, average_attn_weights=False)[1]
    keep = ~PADDING.unsqueeze(1)
    with record_attention(layer) as log:
        layer(x, x, x, PADDING, need_weights=False)
        layer(x, x, x, PADDING)
    assert list(log) == [""]
    assert len(log[""]) == 2
    for record in log[""]:
        torch.testing.assert_close(record.column_sums, weights.sum(-2).detach())
        torch.testing.assert_close(record.entropy, attention_entropy(weights).detach())
        error = marginal_error(weights, keep, keep)
        torch.testing.assert_close(record.row_error, error.rows.detach())
        torch.testing.assert_close(record.column_error, error.columns.detach())
        assert torch.equal(record.query_mask, keep.expand(2, 2, 5))
        assert torch.equal(record.key_mask, keep.expand(2, 2, 5))
        assert not any(field.requires_grad for field in record)


def test_layers_in_the_order_of_the_model() -> None:
    model = encoder(n_iters=5)
    with record_attention(model) as log:
        model(sequences())
    assert list(log) == NAMES
    assert [len(records) for records in log.values()] == [1, 1]
    assert log[NAMES[0]][0].column_sums.shape == (2, 2, 5)
    assert log[NAMES[0]][0].row_error.max() < 1e-6
    assert log[NAMES[0]][0].column_error.max() > log[NAMES[0]][0].row_error.max()
    assert not torch.equal(log[NAMES[0]][0].entropy, log[NAMES[1]][0].entropy)


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("normalizer", ["softmax", "sinkhorn"])
def test_nothing_changes(train: bool, normalizer: str) -> None:
    """Outputs and gradients bit for bit, and the state of the random numbers, with dropout in the map."""
    model, x = encoder(0.3, normalizer).train(train), sequences()

    def run() -> tuple[Tensor, ...]:
        torch.manual_seed(4)
        out = model(x, src_key_padding_mask=PADDING)
        return out, *torch.autograd.grad(out.square().sum(), [x, *model.parameters()]), torch.get_rng_state()

    want = run()
    with record_attention(model) as log:
        got = run()
    assert all(torch.equal(one, other) for one, other in zip(got, want, strict=True))
    assert all(len(records) == 1 for records in log.values())
    assert plain(model)
    assert torch.equal(run()[0], want[0])


def test_dropout_is_not_in_the_record() -> None:
    model = encoder(0.5, "softmax").train()
    with record_attention(model) as log:
        model(sequences())
    for records in log.values():
        torch.testing.assert_close(records[0].column_sums.sum(-1), torch.full((2, 2), 5.0))


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_without_gradients(context: type) -> None:
    model = encoder().eval()
    with record_attention(model) as log, context():
        model(sequences())
    assert all(len(records) == 1 for records in log.values())


def test_autocast() -> None:
    model = encoder(n_iters=5)
    with record_attention(model) as log, torch.autocast("cpu", torch.bfloat16):
        model(sequences())
    assert log[NAMES[0]][0].row_error.dtype == torch.float32
    assert log[NAMES[0]][0].row_error.max() < 1e-5


@pytest.mark.parametrize("entries", [1, 25, 50, 75])
def test_a_few_heads_at_a_time(entries: int, monkeypatch: pytest.MonkeyPatch) -> None:
    normalizer = Holder(get_normalizer("sinkhorn"))
    query, key = torch.randn(3, 2, 5, 4), torch.randn(3, 1, 5, 4)
    bias, mask = torch.randn(2, 5, 5), torch.rand(3, 1, 5) > 0.3
    with record_attention(normalizer) as log:
        normalizer(query, key, key, bias, mask)
        monkeypatch.setattr(diagnostics, "CHUNK_ENTRIES", entries)
        sizes: list[int] = []
        monkeypatch.setattr(diagnostics, "_measure", _spy(diagnostics._measure, sizes))
        normalizer(query, key, key, bias, mask)
    assert max(sizes) <= max(entries, 25)
    assert sum(sizes) == 3 * 2 * 25
    whole, chunked = log[""]
    for one, other in zip(chunked, whole, strict=True):
        torch.testing.assert_close(one, other)


def _spy(measure: object, sizes: list[int]) -> object:
    def spied(coupling: Tensor, *rest: Tensor | None) -> object:
        sizes.append(coupling.numel())
        return measure(coupling, *rest)  # type: ignore[operator]

    return spied


class PerHead(Normalizer):
    """Has a temperature for each head, so that heads cannot be taken apart."""

    def __init__(self) -> None:
        super().__init__(num_heads=2)
        self.temperature = nn.Parameter(torch.tensor([1.0, 5.0]).view(2, 1, 1))

    def from_scores(self, scores: Tensor, query_mask: Tensor | None = None, key_mask: Tensor | None = None) -> Tensor:
        return (scores * self.temperature).softmax(-1)


def test_parameters_for_each_head(monkeypatch: pytest.MonkeyPatch) -> None:
    holder = Holder(PerHead())
    tokens = torch.randn(3, 2, 5, 4)
    monkeypatch.setattr(diagnostics, "CHUNK_ENTRIES", 1)
    with record_attention(holder) as log:
        holder(tokens, tokens, tokens)
    want = column_sums(holder.normalizer.coupling(tokens, tokens)).detach()
    torch.testing.assert_close(log[""][0].column_sums, want)


class Holder(nn.Module):
    """A host in its simplest form."""

    def __init__(self, normalizer: Normalizer) -> None:
        super().__init__()
        self.normalizer = normalizer

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None, mask: Tensor | None = None
    ) -> Tensor:
        return self.normalizer.attend(q, k, v, attn_bias=bias, query_mask=mask, key_mask=mask)


@pytest.mark.parametrize("bias", ["bool", "float"])
def test_tokens_without_support_are_left_out(bias: str) -> None:
    keep = torch.ones(5, 5, dtype=torch.bool)
    keep[2], keep[:, 4] = False, False
    tokens = torch.randn(2, 5, 4)
    holder = Holder(get_normalizer("sinkhorn", n_iters=401))
    with record_attention(holder) as log:
        holder(tokens, tokens, tokens, keep if bias == "bool" else torch.zeros(5, 5).masked_fill(~keep, -torch.inf))
    (record,) = log[""]
    assert record.query_mask.tolist() == [[True, True, False, True, True]] * 2
    assert record.key_mask.tolist() == [[True, True, True, True, False]] * 2
    assert max(record.row_error.max(), record.column_error.max()) < 1e-5


class FromScores(nn.Module):
    """A host that makes its own scores, as talking heads do."""

    def __init__(self) -> None:
        super().__init__()
        self.normalizer = get_normalizer("sinkhorn", n_iters=3)

    def forward(self, scores: Tensor) -> Tensor:
        return self.normalizer.from_scores(scores)


def test_without_leading_dimensions() -> None:
    normalizer = get_normalizer("sinkhorn", n_iters=2)
    query, key, value = torch.randn(5, 4), torch.randn(6, 4), torch.randn(6, 3)
    with record_attention(nn.ModuleList([normalizer])) as log:
        normalizer.attend(query, key, value)
    record = log[""][0]
    torch.testing.assert_close(record.column_sums, normalizer.coupling(query, key).sum(-2))
    assert record.row_error.shape == record.column_error.shape == ()


def test_calls_in_other_threads_are_recorded() -> None:
    normalizer = get_normalizer("sinkhorn")
    both = threading.Barrier(2, timeout=20)

    class Waiting(Normalizer):
        """Both threads are within the call at once."""

        def coupling(self, *args: Tensor, **kwargs: object) -> Tensor:
            if not self.measured:
                both.wait()
            return normalizer.coupling(*args, **kwargs)

        @property
        def measured(self) -> bool:
            """Whether the recorder asks, which it does without gradients."""
            return not torch.is_grad_enabled()

    waiting = Waiting()
    with record_attention(nn.ModuleList([waiting])) as log:
        threads = [threading.Thread(target=waiting.attend, args=tuple(torch.randn(3, 2, 5, 4))) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(log[""]) == 2


def test_given_scores() -> None:
    scores = torch.randn(2, 5, 5)
    host = FromScores()
    with record_attention(host) as log:
        coupling = host(scores)
    (record,) = log[""]
    torch.testing.assert_close(record.column_sums, coupling.sum(-2))
    torch.testing.assert_close(record.column_error, marginal_error(coupling).columns)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_is_recorded_once(reentrant: bool) -> None:
    model, x = encoder(), sequences()
    model(x).square().sum().backward()
    want = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    with record_attention(model) as log:
        checkpoint(model, x, use_reentrant=reentrant).square().sum().backward()
    assert [len(records) for records in log.values()] == [1, 1]
    for parameter, gradient in zip(model.parameters(), want, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)


def test_nested_contexts() -> None:
    """Each log has what ran while it was open, in whatever order they close."""
    model, x = encoder(), sequences()
    outer, inner = record_attention(model), record_attention(model.layers[0])
    log = outer.__enter__()
    model(x)
    inner_log = inner.__enter__()
    model(x)
    outer.__exit__(None, None, None)
    model(x)
    inner.__exit__(None, None, None)
    model(x)
    assert [len(records) for records in log.values()] == [2, 2]
    assert {name: len(records) for name, records in inner_log.items()} == {"self_attn": 2}
    assert plain(model)


def test_exceptions_leave_nothing_behind() -> None:
    model = encoder()
    with pytest.raises(ValueError, match="cannot be causal"), record_attention(model) as log:
        model(sequences(), mask=nn.Transformer.generate_square_subsequent_mask(5))
    assert plain(model)
    assert all(records == [] for records in log.values())
    with record_attention(model) as log:
        with pytest.raises(ValueError, match="cannot be causal"):
            model(sequences(), mask=nn.Transformer.generate_square_subsequent_mask(5))
        model(sequences())
    assert all(len(records) == 1 for records in log.values())


def test_copies_made_meanwhile_are_plain() -> None:
    """An exponential moving average, or a checkpoint, made inside the context must not write into the log."""
    model, x = encoder(), sequences()
    with record_attention(model) as log:
        twins = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
        for twin in twins:
            with torch.no_grad():
                twin.layers[0].self_attn.normalizer.n_iters = 1
            torch.testing.assert_close(twin(x), _with_n_iters(twin, 1)(x))
    assert all(records == [] for records in log.values())
    for twin in twins:
        with record_attention(twin) as own:
            twin(x)
        assert all(len(records) == 1 for records in own.values())


def _with_n_iters(model: nn.Module, n_iters: int) -> nn.Module:
    fresh = encoder()
    fresh.load_state_dict(model.state_dict())
    fresh.layers[0].self_attn.set_normalizer("sinkhorn", n_iters=n_iters)
    return fresh


def test_stock_model_made_visible() -> None:
    """convert(model, "softmax") and the recorder give the column sums of torch's own weights."""
    torch.manual_seed(0)
    layer, x = nn.MultiheadAttention(8, 2, batch_first=True), sequences()
    want = layer(x, x, x, average_attn_weights=False)[1]
    convert(layer, "softmax")
    with record_attention(layer) as log:
        layer(x, x, x, need_weights=False)
    torch.testing.assert_close(log[""][0].column_sums, want.sum(-2).detach())


def test_models_without_attention() -> None:
    with (
        pytest.raises(ValueError, match="Linear has no attention that can be recorded; convert"),
        record_attention(nn.Linear(2, 2)),
    ):
        pass


def test_a_module_used_twice_and_a_holder_of_two() -> None:
    holder = Holder(get_normalizer("softmax"))
    two = nn.ModuleDict({"rows": get_normalizer("softmax"), "columns": get_normalizer("sinkhorn")})
    tokens = torch.randn(2, 5, 4)
    with record_attention(nn.ModuleDict({"a": holder, "b": holder, "two": two})) as log:
        holder(tokens, tokens, tokens)
        holder(tokens, tokens, tokens)
        two["columns"].attend(tokens, tokens, tokens)
    assert {name: len(records) for name, records in log.items()} == {"a": 2, "two.rows": 0, "two.columns": 1}


def test_compiled_model() -> None:
    model, x = encoder(), sequences()
    compiled = torch.compile(model, backend="aot_eager")
    want = compiled(x)
    with record_attention(compiled) as log, warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.testing.assert_close(compiled(x), want)
    assert {name: len(records) for name, records in log.items()} == dict.fromkeys(NAMES, 1)
    torch.testing.assert_close(compiled(x), want)
    assert [len(records) for records in log.values()] == [1, 1]
