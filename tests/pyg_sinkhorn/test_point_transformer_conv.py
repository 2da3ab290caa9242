import copy

import pytest
import torch
from pyg_sinkhorn import SinkhornPointTransformerConv, knn
from sinkhorn_attention.reference import sinkhorn_reference
from torch import nn
from torch_geometric.nn import PointTransformerConv


def pair(n_iters, **options):
    """torch_geometric's layer and ours with the same weights."""
    layers = []
    for build in (PointTransformerConv, lambda *a, **k: SinkhornPointTransformerConv(*a, n_iters=n_iters, **k)):
        torch.manual_seed(0)
        layers.append(build(4, 6, attn_nn=nn.Linear(6, 6), **options).double())
    assert set(layers[0].state_dict()) == set(layers[1].state_dict())
    return layers


def neighbour_graph(n=8, k=3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x, pos = torch.randn(n, 4, generator=generator).double(), torch.randn(n, 3, generator=generator).double()
    senders = knn(pos.unsqueeze(0), pos.unsqueeze(0), k)[0]
    return x, pos, torch.stack([senders.flatten(), torch.arange(n).repeat_interleave(k)])


@pytest.mark.parametrize("options", [{}, {"add_self_loops": False}, {"aggr": "mean"}])
def test_one_half_step_is_the_original_layer(options, value_and_gradient):
    theirs, ours = pair(1, **options)
    x, pos, edge_index = neighbour_graph()
    got = value_and_gradient(ours, x, pos, edge_index=edge_index)
    want = value_and_gradient(theirs, x, pos, edge_index=edge_index)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)


def on_paper(layer, x, pos, edge_index, n_iters):
    """The layer as a dense map over all pairs, -inf where there is no edge."""
    n = x.shape[0]
    edge = torch.zeros(n, n, dtype=torch.bool)
    edge[edge_index[1], edge_index[0]] = True
    edge.fill_diagonal_(True)
    delta = layer.pos_nn(pos.unsqueeze(1) - pos.unsqueeze(0))
    scores = layer.attn_nn(layer.lin_dst(x).unsqueeze(1) - layer.lin_src(x).unsqueeze(0) + delta)
    scores = scores.masked_fill(~edge.unsqueeze(-1), -torch.inf).permute(2, 0, 1)
    weights = sinkhorn_reference(scores, n_iters).permute(1, 2, 0)
    return (weights * (layer.lin(x).unsqueeze(0) + delta)).sum(1)


@pytest.mark.parametrize("n_iters", [2, 3, 5])
def test_value_and_gradient_are_the_dense_definitions(n_iters, value_and_gradient):
    _, ours = pair(n_iters)
    x, pos, edge_index = neighbour_graph()

    got = value_and_gradient(ours, x, pos, edge_index=edge_index)
    want = value_and_gradient(ours, x, pos, on_paper=lambda x, pos: on_paper(ours, x, pos, edge_index, n_iters))
    torch.testing.assert_close(got, want)


def test_permuting_the_nodes_permutes_the_result():
    _, ours = pair(3)
    x, pos, edge_index = neighbour_graph()
    order = torch.tensor([3, 0, 7, 5, 1, 4, 6, 2])
    torch.testing.assert_close(ours(x[order], pos[order], order.argsort()[edge_index]), ours(x, pos, edge_index)[order])


@pytest.mark.parametrize("self_loops", [True, False])
def test_a_batch_of_graphs_gives_each_graphs_result(self_loops):
    _, ours = pair(4, add_self_loops=self_loops)
    graphs = [neighbour_graph(8, 2, 0), neighbour_graph(5, 1, 1)]
    if not self_loops:  # drop each node's edge to itself, so that some nodes send nothing
        graphs = [(x, pos, edges[:, edges[0] != edges[1]]) for x, pos, edges in (neighbour_graph(8, 3), graphs[0])]
    offset = graphs[0][0].shape[0]
    x, pos = (torch.cat([graph[i] for graph in graphs]) for i in (0, 1))
    edge_index = torch.cat([graphs[0][2], graphs[1][2] + offset], dim=1)
    batch = (torch.arange(len(x)) >= offset).long()
    expected = torch.cat([ours(*graph) for graph in graphs])
    torch.testing.assert_close(ours(x, pos, edge_index, batch=batch), expected)
    if self_loops:
        torch.testing.assert_close(ours(x, pos, edge_index), expected)


def test_senders_and_receivers_may_differ(value_and_gradient):
    layers = []
    for build in (PointTransformerConv, SinkhornPointTransformerConv):
        torch.manual_seed(0)
        layers.append(build((4, 4), 6, add_self_loops=False).double())
    theirs, ours = layers
    ours.n_iters = 1
    x, pos = (
        (torch.randn(5, 4).double(), torch.randn(3, 4).double()),
        (torch.randn(5, 3).double(), torch.randn(3, 3).double()),
    )
    edge_index = torch.tensor([[0, 1, 2, 4, 4], [0, 0, 1, 2, 1]])
    torch.testing.assert_close(ours(x, pos, edge_index), theirs(x, pos, edge_index))
    ours.n_iters = 4
    batch = torch.zeros(5, dtype=torch.int64), torch.zeros(3, dtype=torch.int64)
    torch.testing.assert_close(ours(x, pos, edge_index, batch=batch), ours(x, pos, edge_index))


def test_copies_give_the_same():
    _, ours = pair(3)
    x, pos, edge_index = neighbour_graph()
    assert torch.equal(copy.deepcopy(ours)(x, pos, edge_index), ours(x, pos, edge_index))


def test_a_sparse_matrix_is_refused():
    _, ours = pair(3)
    x, pos, edge_index = neighbour_graph()
    matrix = torch.sparse_coo_tensor(edge_index, torch.ones(edge_index.shape[1]), (8, 8))
    with pytest.raises(ValueError, match="edge_index must be a dense tensor"):
        ours(x, pos, matrix)
