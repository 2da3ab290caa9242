"""MultiheadAttention, a drop-in for torch.nn.MultiheadAttention."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .masks import CAUSAL_FILL, CAUSAL_REFUSAL, bias_from_keep, keep_from_hide, padded_queries
from .normalizers import NormalizerChoice, choose_normalizer, normalizer_for
from .normalizers.scores import full_precision_matmul


class MultiheadAttention(nn.MultiheadAttention):
    """torch.nn.MultiheadAttention whose map comes from a normalizer: `sinkhorn`, or any other of the registry.

    Constructor, parameter names and forward are torch's, so state dicts load in both directions, and at n_iters=1 so
    are outputs and weights, with these differences:

    - In self-attention a padded token (`key_padding_mask`) is left out as a query too: otherwise it would take a share
      of every column. Its row of the map is 0, its output the bias of `out_proj`. The same holds for a row that no mask
      leaves anything to attend to, where torch gives NaN.
    - `is_causal=True` and triangular masks are refused unless each row depends on its own query alone (`softmax`, `l2`,
      `sigmoid`).
    - Integer masks are refused: they may mean either polarity.
    - Floating masks hide at -9e3 and below, where hosts write -1e4, -1e9 or their dtype's lowest number for -inf. To
      softmax these are all the same; a column step would restore a column that is low throughout.

    torch's encoder layers evaluate their own softmax instead of calling the module in eval mode without gradients; they
    do not for this class, whose `_qkv_same_embed_dim` is False whatever the widths. nn.TransformerEncoder warns about
    that (`enable_nested_tensor`) when it is built; pass enable_nested_tensor=False. Nested tensors are taken in
    self-attention, with `batch_first=True`.

    With `add_bias_kv` or `add_zero_attn` the map has one more column for each, a key like any other: its column sums to
    n / m as the others do.

    Args:
        embed_dim, num_heads, dropout, bias, add_bias_kv, add_zero_attn, kdim, vdim, batch_first, device, dtype: as for
            torch.nn.MultiheadAttention. Dropout acts on the final map, without renormalising.
        normalizer: as for `get_normalizer`: a name, a mapping of "name" and options, or a Normalizer.
        **options: the normalizer's options, such as `n_iters`.

    Raises:
        ValueError: for an unknown normalizer or an option that it does not have or does not take.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        normalizer: NormalizerChoice = "sinkhorn",
        **options: Any,
    ) -> None:
        super().__init__(
            embed_dim,
            num_heads,
            dropout=dropout,
            bias=bias,
            add_bias_kv=add_bias_kv,
            add_zero_attn=add_zero_attn,
            kdim=kdim,
            vdim=vdim,
            batch_first=batch_first,
            device=device,
            dtype=dtype,
        )
        self.set_normalizer(normalizer, **options)

    def set_normalizer(self, normalizer: NormalizerChoice, **options: Any) -> None:
        """Replaces what makes the map; the projections stay. Arguments and errors as for `get_normalizer`."""
        chosen = choose_normalizer(normalizer, options=options)
        self.normalizer = normalizer_for(self, chosen, (self.num_heads, self.head_dim))
        self._qkv_same_embed_dim = False

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
        query_padding_mask: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Attends from `query` to `key` and `value`; arguments and layout as for torch.nn.MultiheadAttention.

        Args:
            query: (L, N, embed_dim), (N, L, embed_dim) with `batch_first`, or (L, embed_dim).
            key: (S, N, kdim), (N, S, kdim) or (S, kdim).
            value: (S, N, vdim), (N, S, vdim) or (S, vdim).
            key_padding_mask: (N, S) or (S,); boolean, True HIDES, or floating, added to the key's scores, where -9e3
                and less hides. In self-attention (query and key are the same tensor) what it hides is hidden as a
                query too.
            need_weights: whether to return the map as well, which is then held in memory.
            attn_mask: (L, S) or (N * num_heads, L, S); boolean, True HIDES, or floating, added to the scores, where
                -9e3 and less hides. One whose rows are all alike is a key-padding mask.
            average_attn_weights: whether the returned map is the mean over heads.
            is_causal: torch's hint that `attn_mask` is causal.
            query_padding_mask: (N, L) or (L,), boolean, True HIDES; for cross-attention with padded queries, and for
                self-attention whose query and key are not one tensor. Not in torch's class.

        Returns:
            The output, shaped as `query`, and the map as it was applied, (N, L, S), (N, num_heads, L, S) without
            averaging, without N for unbatched input; None without `need_weights`.

        Raises:
            ValueError: for causal attention, shapes that do not fit, and masks neither boolean nor floating.
        """
        if is_causal and not self.normalizer.row_wise:
            raise ValueError(CAUSAL_REFUSAL)
        if is_causal and attn_mask is None:
            raise ValueError("is_causal=True is a hint about attn_mask, which must be given as well")
        if query.is_nested:
            masked = key_padding_mask is not None or attn_mask is not None or query_padding_mask is not None
            return self._forward_nested(query, key, value, masked, need_weights, average_attn_weights)
        self._check_shapes(query, key, value, key_padding_mask, attn_mask, query_padding_mask)

        query_mask, key_mask, attn_bias = _token_masks(query, key, key_padding_mask, query_padding_mask)
        q, k, v = self._project(query, key, value)
        if attn_mask is not None:
            attn_bias = self._add_mask(attn_mask, attn_bias, q.shape[0])
            if query_padding_mask is None and _same_tokens(query, key):
                queries = padded_queries(attn_bias)
                if queries is not None:
                    query_mask = queries if query_mask is None else query_mask & queries
        if self.add_zero_attn or self.bias_k is not None:
            k, v, key_mask, attn_bias = self._append_keys(k, v, key_mask, attn_bias)
        q, k, v = self._split_heads(q), self._split_heads(k), self._split_heads(v)

        dropout_p = self.dropout if self.training else 0.0
        weights: Tensor | None = None
        if need_weights:
            coupling = self.normalizer.coupling(q, k, attn_bias=attn_bias, query_mask=query_mask, key_mask=key_mask)
            coupling = F.dropout(coupling, dropout_p, self.training)
            if key_mask is not None:
                v = v.masked_fill(~key_mask.unsqueeze(-1), 0.0)
            out = full_precision_matmul(coupling, v.to(coupling.dtype)).to(v.dtype)
            weights = coupling.to(query.dtype)
            if average_attn_weights:
                weights = weights.mean(1)
            if query.dim() == 2:
                weights = weights.squeeze(0)
        else:
            out = self.normalizer.attend(
                q, k, v, attn_bias=attn_bias, query_mask=query_mask, key_mask=key_mask, dropout_p=dropout_p
            )
        out = out.transpose(1, 2).flatten(2)
        if query.dim() == 2:
            out = out.squeeze(0)
        elif not self.batch_first:
            out = out.transpose(0, 1)
        return self.out_proj(out), weights

    def _project(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The three input projections, (N, L or S, embed_dim); one product where the inputs are one tensor."""
        weight, bias = self.in_proj_weight, self.in_proj_bias
        if weight is not None and query is key and key is value:
            q, k, v = F.linear(query, weight, bias).chunk(3, -1)
        else:
            if weight is not None:
                q_weight, k_weight, v_weight = weight.chunk(3)
            else:
                q_weight, k_weight, v_weight = self.q_proj_weight, self.k_proj_weight, self.v_proj_weight
            q_bias, k_bias, v_bias = (None, None, None) if bias is None else bias.chunk(3)
            q, k, v = (
                F.linear(query, q_weight, q_bias),
                F.linear(key, k_weight, k_bias),
                F.linear(value, v_weight, v_bias),
            )
        if query.dim() == 2:
            return q.unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0)
        if not self.batch_first:
            return q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1)
        return q, k, v

    def _split_heads(self, tokens: Tensor) -> Tensor:
        """(N, L, embed_dim) -> (N, num_heads, L, head_dim)."""
        return tokens.unflatten(-1, [self.num_heads, self.head_dim]).transpose(1, 2)

    def _append_keys(
        self, k: Tensor, v: Tensor, key_mask: Tensor | None, attn_bias: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """Appends the learned key (`add_bias_kv`) and the one of zeros (`add_zero_attn`), which no mask hides."""
        before = k.shape[1]
        if self.bias_k is not None and self.bias_v is not None:
            k = torch.cat([k, self.bias_k.to(k.dtype).expand(k.shape[0], 1, -1)], 1)
            v = torch.cat([v, self.bias_v.to(v.dtype).expand(v.shape[0], 1, -1)], 1)
        if self.add_zero_attn:
            k, v = F.pad(k, [0, 0, 0, 1]), F.pad(v, [0, 0, 0, 1])
        appended = k.shape[1] - before
        if key_mask is not None:
            key_mask = F.pad(key_mask, [0, appended], value=1.0)
        if attn_bias is not None:
            attn_bias = F.pad(attn_bias, [0, appended], value=1.0 if attn_bias.dtype == torch.bool else 0.0)
        return k, v, key_mask, attn_bias

    def _add_mask(self, attn_mask: Tensor, key_bias: Tensor | None, batch: int) -> Tensor:
        """The mask with True for keep, or as a bias, broadcastable to (N, num_heads, L, S), plus the keys' bias."""
        if attn_mask.dtype == torch.bool:
            attn_mask = ~attn_mask
        else:
            attn_mask = attn_mask.masked_fill(attn_mask <= CAUSAL_FILL, -torch.inf)
        if attn_mask.dim() == 3:
            attn_mask = attn_mask.view(batch, self.num_heads, attn_mask.shape[1], attn_mask.shape[2])
        if key_bias is None:
            return attn_mask
        if attn_mask.dtype == torch.bool:
            attn_mask = bias_from_keep(attn_mask, key_bias.dtype)
        return attn_mask + key_bias

    def _forward_nested(
        self, query: Tensor, key: Tensor, value: Tensor, masked: bool, need_weights: bool, average_attn_weights: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Self-attention over a nested tensor, as nn.TransformerEncoder makes one of padded input in eval mode."""
        if masked or not (query is key and key is value and self.batch_first):
            raise ValueError(
                "a nested tensor is taken in self-attention only (query, key and value one tensor), with "
                "batch_first=True and without masks; pad it and pass key_padding_mask otherwise"
            )
        lengths = [sample.shape[0] for sample in query.unbind()]
        tokens = query.to_padded_tensor(0.0)
        padding = torch.arange(tokens.shape[1]) >= torch.tensor(lengths).unsqueeze(-1)
        padding = padding.to(tokens.device)
        out, weights = self.forward(tokens, tokens, tokens, padding, need_weights, None, average_attn_weights)
        return torch.nested.as_nested_tensor([o[:n] for o, n in zip(out, lengths, strict=True)]), weights

    def _check_shapes(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None,
        attn_mask: Tensor | None,
        query_padding_mask: Tensor | None,
    ) -> None:
        """Raises ValueError that names the argument, what it got and what it needs."""
        if query.dim() not in (2, 3):
            raise ValueError(f"query must have 2 (unbatched) or 3 dimensions, got {tuple(query.shape)}")
        widths = (("query", query, self.embed_dim), ("key", key, self.kdim), ("value", value, self.vdim))
        for name, tensor, width in widths:
            if tensor.dim() != query.dim() or tensor.shape[-1] != width:
                needs = f"{query.dim()} dimensions, as the query, and the last of {width}"
                raise ValueError(f"{name} must have {needs}, got {tuple(tensor.shape)}")
        axis = 1 if query.dim() == 3 and self.batch_first else 0
        batch = () if query.dim() == 2 else (query.shape[1 - axis],)
        rows, columns = query.shape[axis], key.shape[axis]
        if key.shape[:-1] != value.shape[:-1] or (batch and key.shape[1 - axis] != batch[0]):
            got = ", ".join(str(tuple(tensor.shape)) for tensor in (query, key, value))
            raise ValueError(f"query, key and value must agree in the batch, key and value in length too, got {got}")
        _check_mask("key_padding_mask", key_padding_mask, (*batch, columns))
        _check_mask("query_padding_mask", query_padding_mask, (*batch, rows))
        heads = self.num_heads * (batch[0] if batch else 1)
        _check_mask("attn_mask", attn_mask, (rows, columns), (heads, rows, columns))


def _check_mask(name: str, mask: Tensor | None, *shapes: tuple[int, ...]) -> None:
    """Raises ValueError unless the mask is boolean or floating and has one of the shapes."""
    if mask is None:
        return
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise ValueError(f"{name} must be boolean (True hides) or floating (added), got {mask.dtype}")
    if tuple(mask.shape) not in shapes:
        raise ValueError(f"{name} must have shape {' or '.join(map(str, shapes))}, got {tuple(mask.shape)}")


def _same_tokens(query: Tensor, key: Tensor) -> bool:
    """Whether query and key are one tensor, or what reentrant checkpointing makes of one.

    It detaches every argument by itself, so that the recomputation does not see one object but two plain tensors over
    the same memory. Two views of a tensor are two tensors: a compiled model, which sees no memory, takes them so.
    """
    if query is key:
        return True
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return False
    plain = type(query) is Tensor and type(key) is Tensor and not query.is_meta
    return plain and not query._is_view() and not key._is_view() and query.shape == key.shape and query.is_set_to(key)


def _token_masks(
    query: Tensor,
    key: Tensor,
    key_padding_mask: Tensor | None,
    query_padding_mask: Tensor | None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """(queries that take part, keys that take part, bias of the keys), each with dimensions for heads and rows."""
    if key_padding_mask is None:
        query_mask = keep_from_hide(query_padding_mask, "query_padding_mask")
        return None if query_mask is None else query_mask.view(-1, 1, query_mask.shape[-1]), None, None
    hidden, key_bias = key_padding_mask, key_padding_mask
    has_bias = key_padding_mask.is_floating_point()
    if has_bias:
        hidden = key_padding_mask <= CAUSAL_FILL
        key_bias = key_padding_mask.masked_fill(hidden, 0.0)
    # torch's encoder layers turn every boolean mask into 0 and -inf. Where reading the data costs no synchronisation,
    # a bias of zeros is left out: the fast engines are faster without.
    readable = hidden.device.type == "cpu" and not torch.compiler.is_compiling() and not key_bias.requires_grad
    has_bias = has_bias and not (readable and not bool(key_bias.any()))
    if query_padding_mask is None and _same_tokens(query, key):
        query_padding_mask = hidden
    query_mask = keep_from_hide(query_padding_mask, "query_padding_mask")
    return (
        None if query_mask is None else query_mask.view(-1, 1, query_mask.shape[-1]),
        ~hidden.view(-1, 1, hidden.shape[-1]),
        key_bias.view(-1, 1, 1, hidden.shape[-1]) if has_bias else None,
    )
