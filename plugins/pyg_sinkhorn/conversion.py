"""convert: Sinkhorn attention into torch_geometric's modules, with their weights kept."""

from collections.abc import Mapping, Sequence
from typing import Any

import sinkhorn_attention
from sinkhorn_attention.conversion import select_layers
from sinkhorn_attention.normalizers import (
    Normalizer,
    NormalizerChoice,
    choose_normalizer,
    get_normalizer,
    normalizer_for,
)
from torch import Tensor, nn
from torch_geometric.nn import PointTransformerConv
from torch_geometric.nn.aggr.utils import MultiheadAttentionBlock

from .blocks import MAB
from .point_cloud_transformer import OffsetAttention
from .point_transformer_conv import SinkhornPointTransformerConv


def convert(
    model: nn.Module,
    normalizer: NormalizerChoice = "sinkhorn",
    *,
    layers: int | Sequence[int] | str | None = None,
    strict: bool = True,
    **options: Any,
) -> list[str]:
    """Replaces softmax attention in a torch_geometric model, in place, weights and parameter names kept.

    Three kinds of modules are converted:

    - every torch.nn.MultiheadAttention outside decoders, by `sinkhorn_attention.convert`: those of
      SetTransformerAggregation, GraphMultisetTransformer, PatchTransformerAggregation, the set attention blocks,
      GPSConv and MultiAggregation. Their masks stay exact: torch_geometric's blocks hand the attention the keys' mask
      only, so the padded queries of an InducedSetAttentionBlock would take a share of every column; converted blocks
      hand over both.
    - PointTransformerConv, for "sinkhorn" (and "softmax", which undoes it), by `SinkhornPointTransformerConv` over the
      same layers and parameters. Hooks on such a layer are not kept.
    - the blocks of this package's own models, `MAB` and `OffsetAttention`, which take any normalizer.

    Pooling with a single seed (PoolingByMultiheadAttention, num_seed_points=1) becomes mean pooling from the second
    half-step on: see `PMA`. `layers="encoders*"` leaves the pooling of a SetTransformerAggregation as it is.

    Args:
        model: the model.
        normalizer: a name, a mapping of "name" and options, or a Normalizer: see `sinkhorn_attention.get_normalizer`.
        layers: None for all, an int for the last k, a list of indices, or an fnmatch pattern of module names.
        strict: whether it is an error when there is nothing to convert, or a PointTransformerConv is selected that the
            normalizer cannot serve.
        **options: the normalizer's options, such as n_iters.

    Returns:
        Names of the converted modules, in the order of the model.

    Raises:
        ValueError: before anything is changed, and says why.
    """
    chosen = choose_normalizer(normalizer, options=options)
    edge_iters, refusal = _edge_iterations(chosen)
    in_decoders = {
        module
        for decoder in model.modules()
        if isinstance(decoder, nn.TransformerDecoderLayer)
        for module in decoder.modules()
    }
    found: dict[str, Any] = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.MultiheadAttention | PointTransformerConv | MAB | OffsetAttention)
        and module not in in_decoders
    }
    if not found:
        if not strict:
            return []
        raise ValueError(
            f"{type(model).__name__} has neither a torch.nn.MultiheadAttention outside decoders nor a "
            "PointTransformerConv to convert, nor a block of pyg_sinkhorn's"
        )
    selected = select_layers(list(found), layers)
    convolutions = [name for name in selected if isinstance(found[name], PointTransformerConv)]
    if convolutions and refusal and strict:
        raise ValueError(f"{', '.join(convolutions)}: {refusal}; leave them out with layers=, or pass strict=False")
    if "" in convolutions and not isinstance(model, SinkhornPointTransformerConv):
        raise ValueError("a bare PointTransformerConv cannot be replaced in place: build SinkhornPointTransformerConv")
    blocks = [name for name in selected if isinstance(found[name], MAB | OffsetAttention)]
    attention = [name for name in selected if name not in {*convolutions, *blocks}]
    normalizers = {name: _normalizer_of(found[name], chosen) for name in blocks}
    if attention:
        done = sinkhorn_attention.convert(nn.ModuleList(found[name] for name in attention), chosen, strict=strict)
        attention = [attention[int(index)] for index in done]
    for block in model.modules():
        if type(block) is MultiheadAttentionBlock and isinstance(block.attn, sinkhorn_attention.MultiheadAttention):
            block.__class__ = PaddedMultiheadAttentionBlock
    if refusal:
        convolutions = []
    for name in blocks:
        found[name].normalizer = normalizers[name]
    for name in convolutions:
        _replace_convolution(model, found[name], edge_iters)
    return [name for name in selected if name in {*attention, *blocks, *convolutions}]


class PaddedMultiheadAttentionBlock(MultiheadAttentionBlock):
    """torch_geometric's block, telling the attention about padded queries as well as padded keys."""

    def forward(self, x: Tensor, y: Tensor, x_mask: Tensor | None = None, y_mask: Tensor | None = None) -> Tensor:
        """(B, n, d) attends to (B, m, d); masks (B, n) and (B, m), True = a real token -> (B, n, d)."""
        out, _ = self.attn(
            x,
            y,
            y,
            key_padding_mask=None if y_mask is None else ~y_mask,
            query_padding_mask=None if x_mask is None else ~x_mask,
            need_weights=False,
        )
        if x_mask is not None:
            out = out.masked_fill(~x_mask.unsqueeze(-1), 0.0)
        out = out + x
        if self.layer_norm1 is not None:
            out = self.layer_norm1(out)
        out = out + self.lin(out).relu()
        return out if self.layer_norm2 is None else self.layer_norm2(out)


def _normalizer_of(block: MAB | OffsetAttention, chosen: Mapping[str, Any]) -> Normalizer:
    """A normalizer for a block of this package's."""
    scores, num_heads = (block.query, block.num_heads) if isinstance(block, MAB) else (block.query_key, 1)
    return normalizer_for(block, chosen, (num_heads, scores.out_features // num_heads))


def _edge_iterations(chosen: Mapping[str, Any]) -> tuple[int, str]:
    """Half-steps over the edges for a normalizer, and why it cannot work on edges ("" where it can)."""
    name, built = chosen["name"], get_normalizer(chosen, head_dim=1, num_heads=1)
    if name == "softmax":
        return 1, ""
    if name != "sinkhorn":
        return 0, f"PointTransformerConv takes sinkhorn or softmax over its edges, not {name}"
    if built.options["gradient"] != "unrolled":
        return 0, f"PointTransformerConv has the unrolled gradient only, not {built.options['gradient']}"
    return built.options["n_iters"], ""


def _replace_convolution(model: nn.Module, layer: PointTransformerConv, n_iters: int) -> None:
    """Puts a SinkhornPointTransformerConv with the layer's own submodules wherever the model holds the layer."""
    if isinstance(layer, SinkhornPointTransformerConv):
        layer.n_iters = n_iters
        return
    replacement = SinkhornPointTransformerConv(
        layer.in_channels,
        layer.out_channels,
        nn.Identity(),
        None,
        layer.add_self_loops,
        n_iters,
        aggr=layer.aggr,
        flow=layer.flow,
        node_dim=layer.node_dim,
        decomposed_layers=layer.decomposed_layers,
    )
    for name, child in layer.named_children():
        setattr(replacement, name, child)
    replacement.train(layer.training)
    for parent in list(model.modules()):
        for name in [name for name, child in parent._modules.items() if child is layer]:
            setattr(parent, name, replacement)
