import pytest
import torch
from pyg_sinkhorn.edge_sinkhorn import edge_sinkhorn
from sinkhorn_attention.reference import sinkhorn_reference

INF = float("inf")


def sparse_problem(n=6, m=5, channels=2, seed=0):
    """A random support where row 4 and column 2 have no edge."""
    generator = torch.Generator().manual_seed(seed)
    support = torch.rand(n, m, generator=generator) < 0.6
    support[4], support[:, 2] = False, False
    rows, columns = support.nonzero().unbind(1)
    return torch.randn(len(rows), channels, generator=generator, dtype=torch.float64), rows, columns, n, m


def through_dense(scores, rows, columns, n, m, n_iters):
    """The same by the dense definition, -inf where there is no edge."""
    dense = scores.new_full((n, m, scores.shape[1]), -INF).index_put((rows, columns), scores)
    return sinkhorn_reference(dense.permute(2, 0, 1), n_iters).permute(1, 2, 0)[rows, columns]


def value_and_gradient(function, scores):
    scores = scores.detach().requires_grad_()
    out = function(scores)
    weight = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)
    return out.detach(), torch.autograd.grad((out * weight).sum(), scores)[0]


@pytest.mark.parametrize("n_iters", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("std", [1.0, 100.0])
def test_value_and_gradient_are_the_dense_definitions(n_iters, std):
    scores, *graph = sparse_problem()
    got = value_and_gradient(lambda s: edge_sinkhorn(s, *graph, n_iters), scores * std)
    want = value_and_gradient(lambda s: through_dense(s, *graph, n_iters), scores * std)
    assert all(x.isfinite().all() for x in got)
    torch.testing.assert_close(got, want)


def test_edges_at_minus_infinity_are_no_support():
    scores, rows, columns, n, m = sparse_problem()
    scores[rows == 1] = -INF
    scores[3, 0] = -INF  # in one channel only
    graph = rows, columns, n, m
    got = value_and_gradient(lambda s: edge_sinkhorn(s, *graph, 4), scores)
    want = value_and_gradient(lambda s: through_dense(s, *graph, 4), scores)
    assert all(x.isfinite().all() for x in got)
    torch.testing.assert_close(got, want)


def test_a_single_channel_needs_no_dimension():
    scores, *graph = sparse_problem(channels=1)
    torch.testing.assert_close(edge_sinkhorn(scores[:, 0], *graph, 3), edge_sinkhorn(scores, *graph, 3)[:, 0])


def test_a_batch_of_graphs_gives_each_graphs_result():
    graphs = [sparse_problem(6, 5, seed=0), sparse_problem(9, 4, seed=1)]
    scores = torch.cat([graph[0] for graph in graphs])
    rows = torch.cat([graphs[0][1], graphs[1][1] + 6])
    columns = torch.cat([graphs[0][2], graphs[1][2] + 5])
    batches = {
        "row_batch": torch.tensor([0] * 6 + [1] * 9),
        "column_batch": torch.tensor([0] * 5 + [1] * 4),
    }
    got = value_and_gradient(lambda s: edge_sinkhorn(s, rows, columns, 15, 9, 4, **batches), scores)
    alone = torch.cat([edge_sinkhorn(*graph, 4) for graph in graphs])
    torch.testing.assert_close(got[0], alone)
    # Without the batch vectors the ratio of rows to columns would be that of both graphs together.
    assert (edge_sinkhorn(scores, rows, columns, 15, 9, 4) - alone).abs().max() > 1e-2


def test_half_precision_iterates_in_float32():
    scores, *graph = sparse_problem()
    out = edge_sinkhorn(scores.bfloat16() * 8, *graph, 7)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out, edge_sinkhorn(scores.bfloat16().float() * 8, *graph, 7).bfloat16())


def test_no_edges_at_all():
    nothing = torch.zeros(0, dtype=torch.int64)
    assert edge_sinkhorn(torch.zeros(0, 2), nothing, nothing, 3, 3, 4).shape == (0, 2)


def test_bad_input_is_refused():
    scores, rows, columns, n, m = sparse_problem()
    with pytest.raises(ValueError, match="n_iters must be an integer >= 1"):
        edge_sinkhorn(scores, rows, columns, n, m, 0)
    with pytest.raises(ValueError, match="one entry per edge"):
        edge_sinkhorn(scores, rows[1:], columns, n, m)
    with pytest.raises(ValueError, match="row_batch and column_batch go together"):
        edge_sinkhorn(scores, rows, columns, n, m, row_batch=torch.zeros(n, dtype=torch.int64))
