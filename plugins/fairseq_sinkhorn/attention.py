"""fairseq's MultiheadAttention with its softmax replaced by a normalizer of the suite."""

from collections.abc import Mapping
from typing import Any, Final

import torch
import torch.nn.functional as F
from fairseq.modules import MultiheadAttention
from sinkhorn_attention.masks import CAUSAL_FILL, CAUSAL_REFUSAL
from sinkhorn_attention.normalizers import NormalizerChoice
from sinkhorn_attention.normalizers.scores import full_precision_matmul
from torch import Tensor

from .options import AttentionOptions


class SinkhornMultiheadAttention(MultiheadAttention):
    """fairseq.modules.MultiheadAttention whose map comes from a normalizer, by default Sinkhorn's.

    Parameter names are fairseq's, so state dicts load in both directions, and at `sinkhorn_iters=1` so are outputs and
    maps on valid tokens. In self-attention a padded token takes no part at all: its row and column of the map are 0
    and its output is the bias of `out_proj`, so that a sentence does not see the padding of its batch, whether it
    stands left or right.

    It is made for encoders. A causal mask, `incremental_state` and `static_kv` are refused: the column step lets every
    row depend on later ones. A causal mask is recognised on the CPU, where looking at it costs no synchronisation.

    Args:
        embed_dim: width of the model.
        num_heads: number of heads, a divisor of `embed_dim`.
        *args: further arguments of fairseq's class, by position.
        sinkhorn_iters: number of HALF-steps, rows first; 1 is softmax. None is 3 for normalizers that count any.
        sinkhorn_gradient: "unrolled", "detached" or "implicit", as in `sinkhorn_attention`.
        normalizer: a name, a mapping of "name" and options, or a Normalizer: see `sinkhorn_attention.get_normalizer`.
        normalizer_options: further options of the normalizer.
        mask_queries: whether padded tokens of self-attention are left out as queries; False is for reproducing the
            published sentiment code, which hides them as keys alone.
        **kwargs: as for fairseq's class; `dropout` acts on the final map, without renormalising.

    Raises:
        ValueError: for an unknown normalizer or option, and for `encoder_decoder_attention`, `add_bias_kv`,
            `add_zero_attn` and xFormers, which this class does not have.
    """

    causal_refusal: Final[str] = CAUSAL_REFUSAL
    causal_fill: Final[float] = CAUSAL_FILL

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *args: Any,
        sinkhorn_iters: int | None = None,
        sinkhorn_gradient: str = "unrolled",
        normalizer: NormalizerChoice = "sinkhorn",
        normalizer_options: Mapping[str, Any] | None = None,
        mask_queries: bool = True,
        **kwargs: Any,
    ) -> None:
        super().__init__(embed_dim, num_heads, *args, **kwargs)
        if self.encoder_decoder_attention:
            raise ValueError(
                "encoder_decoder_attention=True: attention of a decoder stays softmax, because the column step makes "
                "an earlier target token depend on later ones; use fairseq.modules.MultiheadAttention there"
            )
        if self.bias_k is not None or self.add_zero_attn:
            raise ValueError(
                "add_bias_kv and add_zero_attn append keys that no query corresponds to, and are not offered here; "
                "sinkhorn_attention.MultiheadAttention has them"
            )
        if self.use_xformers:
            raise ValueError("xformers_att_config makes a map of its own; leave it unset with a normalizer")
        self.mask_queries = mask_queries
        options = AttentionOptions(sinkhorn_iters, sinkhorn_gradient, normalizer, dict(normalizer_options or {}))
        self.normalizer = options.build(self.head_dim, num_heads)

    def forward(
        self,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        key_padding_mask: Tensor | None = None,
        incremental_state: dict[str, dict[str, Tensor | None]] | None = None,
        need_weights: bool = True,
        static_kv: bool = False,
        attn_mask: Tensor | None = None,
        before_softmax: bool = False,
        need_head_weights: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Attends from `query` to `key` and `value`; arguments and layout as for fairseq's class.

        Args:
            query: (T, B, embed_dim).
            key: (S, B, kdim).
            value: (S, B, vdim).
            key_padding_mask: (B, S), boolean or uint8, nonzero HIDES. In self-attention the hidden tokens are left out
                as queries too.
            incremental_state: must be None.
            need_weights: whether to return the map, which is then held in memory.
            static_kv: must be False.
            attn_mask: (T, S) or (B * num_heads, T, S); boolean or uint8, nonzero HIDES, or floating, added to the
                scores, where -9e3 and less hides: fairseq's encoder layers turn boolean masks into -1e8 or -1e4.
            before_softmax: must be False.
            need_head_weights: returns the map of each head instead of their mean.

        Returns:
            The output, (T, B, embed_dim), and the map before dropout, (B, T, S), or (num_heads, B, T, S) with
            `need_head_weights`, in float32 at least; None without `need_weights`.

        Raises:
            ValueError: for causal or incremental use, which a doubly stochastic map does not have, and for shapes and
                masks that do not fit.
        """
        if incremental_state is not None or static_kv:
            raise ValueError(f"incremental_state and static_kv are for decoders. {self.causal_refusal}")
        if before_softmax:
            raise ValueError(
                "before_softmax=True: the map is not a softmax of scores; sinkhorn_attention.record_attention shows it"
            )
        if key is None or value is None:
            raise ValueError("key and value must be given: without incremental state there is nothing stored")
        rows, batch, _ = query.shape
        columns = key.shape[0]
        same_tokens = self.self_attention or query is key
        if key.shape[:2] != value.shape[:2] or key.shape[1] != batch or (self.self_attention and rows != columns):
            raise ValueError(
                "query (T, B, C), key and value (S, B, C) must agree in B, key and value in S, in self-attention all"
                f", got {list(query.shape)}, {list(key.shape)}, {list(value.shape)}"
            )

        q, k, v = self._heads(self.q_proj(query)), self._heads(self.k_proj(key)), self._heads(self.v_proj(value))
        key_mask: Tensor | None = None
        query_mask: Tensor | None = None
        if key_padding_mask is not None and key_padding_mask.dim() > 0:  # fairseq's scripted code may pass a scalar
            if key_padding_mask.shape != (batch, columns):
                needs = f"key_padding_mask must have shape (B, S), {[batch, columns]}"
                raise ValueError(f"{needs}, got {list(key_padding_mask.shape)}")
            key_mask = key_padding_mask.to(torch.bool).logical_not().unsqueeze(1)
            if same_tokens and self.mask_queries:
                query_mask = key_mask
        attn_bias: Tensor | None = None
        if attn_mask is not None:
            attn_bias = self._bias(attn_mask, batch, rows, columns)

        dropout_p = 0.0
        if self.training or self.dropout_module.apply_during_inference:
            dropout_p = float(self.dropout_module.p)
        weights: Tensor | None = None
        if need_weights or need_head_weights:
            coupling = self.normalizer.coupling(
                q, k, scale=self.scaling, attn_bias=attn_bias, query_mask=query_mask, key_mask=key_mask
            )
            if key_mask is not None:
                v = v.masked_fill(key_mask.logical_not().unsqueeze(-1), 0.0)
            dropped = F.dropout(coupling, dropout_p, dropout_p > 0.0)
            out = full_precision_matmul(dropped, v.to(dropped.dtype)).to(v.dtype)
            weights = coupling.transpose(0, 1) if need_head_weights else coupling.mean(1)
        else:
            out = self.normalizer.attend(
                q,
                k,
                v,
                scale=self.scaling,
                attn_bias=attn_bias,
                query_mask=query_mask,
                key_mask=key_mask,
                dropout_p=dropout_p,
            )
        return self.out_proj(out.permute(2, 0, 1, 3).flatten(2)), weights

    def _heads(self, tokens: Tensor) -> Tensor:
        """(T, B, embed_dim) -> (B, num_heads, T, head_dim)."""
        return tokens.unflatten(-1, [self.num_heads, self.head_dim]).permute(1, 2, 0, 3)

    def _bias(self, attn_mask: Tensor, batch: int, rows: int, columns: int) -> Tensor:
        """True for keep, or a bias with -inf where fairseq hides, broadcastable to (B, num_heads, T, S)."""
        if attn_mask.shape != (rows, columns) and attn_mask.shape != (batch * self.num_heads, rows, columns):
            needs = f"attn_mask must have shape (T, S) or (B * num_heads, T, S) for T, S = {rows}, {columns}"
            raise ValueError(f"{needs}, got {list(attn_mask.shape)}")
        if attn_mask.dim() == 3:
            attn_mask = attn_mask.view(batch, self.num_heads, rows, columns)
        if attn_mask.dtype == torch.bool or attn_mask.dtype == torch.uint8:
            return attn_mask.to(torch.bool).logical_not()
        if not attn_mask.is_floating_point():
            raise ValueError(f"attn_mask must be boolean or uint8 (nonzero hides) or floating, got {attn_mask.dtype}")
        return attn_mask.masked_fill(attn_mask <= self.causal_fill, float("-inf"))
