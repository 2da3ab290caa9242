"""Point Transformer convolution with attention normalised over both sides of the edges."""

from collections.abc import Callable
from typing import Optional

from torch import Tensor
from torch_geometric.nn import PointTransformerConv
from torch_geometric.typing import OptTensor, PairTensor
from torch_geometric.utils import add_self_loops, is_sparse, remove_self_loops

from .edge_sinkhorn import edge_sinkhorn


class SinkhornPointTransformerConv(PointTransformerConv):
    """torch_geometric's PointTransformerConv with Sinkhorn over the edges in place of softmax.

    Softmax makes the weights at a receiving node sum to 1. Here each channel's map over the edges is also normalised on
    the sending side, so that after an odd number of half-steps every node receives weight 1 and gives roughly
    n_receivers / n_senders. `n_iters=1` is the original layer. Parameters have the original's names.

    Args:
        in_channels: width of the nodes' features, or a pair (senders, receivers).
        out_channels: width of the output.
        pos_nn: maps relative positions (E, 3) to (E, out_channels); a linear layer by default.
        attn_nn: maps (E, out_channels) to the scores (E, out_channels); the identity by default.
        add_self_loops: whether every node also attends to itself.
        n_iters: number of HALF-steps.
        **kwargs: arguments of torch_geometric.nn.MessagePassing.
    """

    def __init__(
        self,
        in_channels: int | tuple[int, int],
        out_channels: int,
        pos_nn: Callable | None = None,
        attn_nn: Callable | None = None,
        add_self_loops: bool = True,
        n_iters: int = 3,
        **kwargs: object,
    ) -> None:
        super().__init__(in_channels, out_channels, pos_nn, attn_nn, add_self_loops, **kwargs)
        self.n_iters = n_iters

    def forward(
        self,
        x: Tensor | PairTensor,
        pos: Tensor | PairTensor,
        edge_index: Tensor,
        batch: OptTensor | PairTensor = None,
    ) -> Tensor:
        """New node features, (receivers, out_channels).

        Args:
            x: features (nodes, in_channels), or a pair (senders, receivers).
            pos: positions (nodes, 3), or a pair.
            edge_index: (2, E), int64, senders in the first row.
            batch: the graph of each node, (nodes,), or a pair. Needed where a batch of graphs is given as one AND some
                nodes may lack edges on a side (no self-loops, or a pair): n_receivers / n_senders is each graph's own.
                With self-loops on one set of nodes that ratio is 1 and `batch` changes nothing.

        Raises:
            ValueError: for a sparse matrix in place of edge_index.
        """
        if is_sparse(edge_index):
            raise ValueError(
                "edge_index must be a dense tensor (2, E), got a sparse matrix; convert it to an edge list"
            )
        senders, receivers = (x, x) if isinstance(x, Tensor) else x
        pos = (pos, pos) if isinstance(pos, Tensor) else pos
        graphs = (batch, batch) if isinstance(batch, Tensor) else batch
        if self.add_self_loops:
            edge_index, _ = remove_self_loops(edge_index)
            edge_index, _ = add_self_loops(edge_index, num_nodes=min(pos[0].shape[0], pos[1].shape[0]))
        # torch_geometric reads the types of propagate's arguments from the next line.
        # propagate_type: (x: PairTensor, pos: PairTensor, alpha: PairTensor, graphs: Optional[PairTensor])
        return self.propagate(
            edge_index,
            x=(self.lin(senders), receivers),
            pos=pos,
            alpha=(self.lin_src(senders), self.lin_dst(receivers)),
            graphs=graphs,
        )

    def message(
        self,
        x_j: Tensor,
        pos_i: Tensor,
        pos_j: Tensor,
        alpha_i: Tensor,
        alpha_j: Tensor,
        index: Tensor,
        edge_index_j: Tensor,
        graphs: Optional[PairTensor],  # noqa: UP045 (torch_geometric reads these annotations and knows no unions)
        size_i: int,
        size_j: int,
    ) -> Tensor:
        """Value of each edge times its weight; `graphs` holds the graph of each sender and of each receiver."""
        delta = self.pos_nn(pos_i - pos_j)
        scores = alpha_i - alpha_j + delta
        if self.attn_nn is not None:
            scores = self.attn_nn(scores)
        sender_graphs, receiver_graphs = (None, None) if graphs is None else graphs
        weights = edge_sinkhorn(
            scores,
            index,
            edge_index_j,
            size_i,
            size_j,
            self.n_iters,
            row_batch=receiver_graphs,
            column_batch=sender_graphs,
        )
        return weights * (x_j + delta)
