"""Set attention blocks (Lee et al., Set Transformer, ICML 2019) over the registry of normalizers, with exact masks."""

from collections.abc import Mapping

import torch
from sinkhorn_attention.normalizers import NormalizerChoice, choose_normalizer, get_normalizer
from torch import Tensor, nn

NORMS = ("post", "pre", "none")
SCALES = ("width", "head", "none")
RESIDUALS = ("projected", "input")
ROW_MASSES = ("one", "uniform")


class MAB(nn.Module):
    """Multihead attention block: H = LN(Q + A V), out = LN(H + ReLU(W H)), with Q the PROJECTED query.

    As published there is no projection after the heads, and the feed-forward part is one square layer. The coupling A
    comes from any normalizer of the registry.

    Args:
        query_dim: width of the queries' inputs.
        key_dim: width of the keys' inputs.
        dim: width of the block.
        num_heads: number of heads, a divisor of `dim`.
        normalizer: a name, a mapping of "name" and options, or a Normalizer: see `sinkhorn_attention.get_normalizer`.
        n_iters: the normalizer's number of half-steps; None leaves it to the normalizer.
        normalizer_options: further options of the normalizer.
        norm: "post" normalises after each residual sum (published); "pre" normalises what enters the attention and the
            feed-forward part, except inputs whose width is not `dim` (layer norm over three raw coordinates would erase
            position and size); "none" has no layer norm.
        scale: factor of the scores: "width" is dim ** -0.5 (published), "head" is (dim / num_heads) ** -0.5, "none" 1.
        residual: "projected" adds the attention to the projected query (published); "input" adds it to the query itself
            where that has the block's width, else to its projection.
        row_mass: what a row of the coupling sums to after an odd number of half-steps: "one", or "uniform", 1 / number
            of valid queries, the coupling of two uniform measures. The published ModelNet40 code has the latter.
        attn_dropout: dropout probability of the coupling's entries, in training.

    Raises:
        ValueError: for a setting that is not one of those above, or heads that do not divide the width.
    """

    def __init__(
        self,
        query_dim: int,
        key_dim: int,
        dim: int,
        num_heads: int = 4,
        *,
        normalizer: NormalizerChoice = "sinkhorn",
        n_iters: int | None = None,
        normalizer_options: Mapping[str, object] | None = None,
        norm: str = "post",
        scale: str = "width",
        residual: str = "projected",
        row_mass: str = "one",
        attn_dropout: float = 0.0,
    ) -> None:
        super().__init__()
        check_choice("norm", norm, NORMS)
        check_choice("scale", scale, SCALES)
        check_choice("residual", residual, RESIDUALS)
        check_choice("row_mass", row_mass, ROW_MASSES)
        if num_heads < 1 or dim % num_heads:
            raise ValueError(f"num_heads must divide the width {dim}, got {num_heads}")
        self.num_heads = num_heads
        self.scale = {"width": dim**-0.5, "head": (dim / num_heads) ** -0.5, "none": 1.0}[scale]
        self.norm = norm
        self.residual_input = residual == "input" and query_dim == dim
        self.uniform_rows = row_mass == "uniform"
        self.attn_dropout = attn_dropout

        self.query = nn.Linear(query_dim, dim)
        self.key = nn.Linear(key_dim, dim)
        self.value = nn.Linear(key_dim, dim)
        chosen = choose_normalizer(normalizer, n_iters, normalizer_options)
        self.normalizer = get_normalizer(chosen, head_dim=dim // num_heads, num_heads=num_heads)
        pre, post = norm == "pre", norm == "post"
        self.norm_query = nn.LayerNorm(dim) if pre and query_dim == dim else nn.Identity()
        self.norm_key = nn.LayerNorm(dim) if pre and key_dim == dim else nn.Identity()
        self.norm_attention = nn.LayerNorm(dim) if post else nn.Identity()
        self.norm_feedforward = nn.LayerNorm(dim) if pre else nn.Identity()
        self.norm_output = nn.LayerNorm(dim) if post else nn.Identity()
        self.feedforward = nn.Linear(dim, dim)

    def extra_repr(self) -> str:
        return f"num_heads={self.num_heads}, norm={self.norm!r}, scale={self.scale:.4g}"

    def forward(
        self, query: Tensor, key: Tensor, query_mask: Tensor | None = None, key_mask: Tensor | None = None
    ) -> Tensor:
        """Attends from `query` to `key`.

        Args:
            query: (B, n, query_dim).
            key: (B, m, key_dim).
            query_mask: (B, n), boolean, True = a real token.
            key_mask: (B, m), likewise.

        Returns:
            (B, n, dim), 0 at masked queries. Where no key is valid the attention adds 0.
        """
        check_token_mask("query_mask", query_mask, query)
        check_token_mask("key_mask", key_mask, key)
        # Zeroing first keeps whatever lies in the padding, NaN included, out of the weights' gradients as well.
        query, key = hide(query, query_mask), hide(key, key_mask)
        normed_query, normed_key = self.norm_query(query), self.norm_key(key)
        q = self.query(normed_query)
        attended = self.normalizer.attend(
            self._split(q),
            self._split(self.key(normed_key)),
            self._split(self.value(normed_key)),
            scale=self.scale,
            query_mask=None if query_mask is None else query_mask.unsqueeze(1),
            key_mask=None if key_mask is None else key_mask.unsqueeze(1),
            dropout_p=self.attn_dropout if self.training else 0.0,
        )
        attended = attended.transpose(1, 2).flatten(2)
        if self.uniform_rows:
            attended = attended / (query.shape[1] if query_mask is None else valid_count(query_mask).unsqueeze(-1))
        hidden = self.norm_attention((query if self.residual_input else q) + attended)
        hidden = hidden + torch.relu(self.feedforward(self.norm_feedforward(hidden)))
        return hide(self.norm_output(hidden), query_mask)

    def _split(self, x: Tensor) -> Tensor:
        """(B, n, dim) -> (B, heads, n, dim / heads)."""
        return x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)


class SAB(nn.Module):
    """Set attention block: MAB of a set with itself, O(n²). Permutation-equivariant.

    Args:
        in_dim: width of the input.
        dim: width of the block.
        num_heads: number of heads.
        **options: as for `MAB`.
    """

    def __init__(self, in_dim: int, dim: int, num_heads: int = 4, **options: object) -> None:
        super().__init__()
        self.attention = MAB(in_dim, in_dim, dim, num_heads, **options)  # type: ignore[arg-type]

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """(B, n, in_dim) and a mask (B, n), True = a real token -> (B, n, dim)."""
        return self.attention(x, x, mask, mask)


class ISAB(nn.Module):
    """Induced set attention block, O(n · inducing points): the points speak through a few learned ones.

    `gather` attends from the inducing points to the set (a map of m × n), `scatter` from the set to what was gathered
    (n × m). Both maps are rectangular: with Sinkhorn, columns approach n_queries / n_keys. Permutation-equivariant.

    Args:
        in_dim: width of the input.
        dim: width of the block.
        num_heads: number of heads.
        num_inducing: number of inducing points.
        **options: as for `MAB`.
    """

    def __init__(self, in_dim: int, dim: int, num_heads: int = 4, num_inducing: int = 16, **options: object) -> None:
        super().__init__()
        self.inducing = nn.Parameter(nn.init.xavier_uniform_(torch.empty(1, num_inducing, dim)))
        self.gather = MAB(dim, in_dim, dim, num_heads, **options)  # type: ignore[arg-type]
        self.scatter = MAB(in_dim, dim, dim, num_heads, **options)  # type: ignore[arg-type]

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """(B, n, in_dim) and a mask (B, n), True = a real token -> (B, n, dim)."""
        gathered = self.gather(self.inducing.expand(x.shape[0], -1, -1), x, key_mask=mask)
        return self.scatter(x, gathered, query_mask=mask)


class PMA(nn.Module):
    """Pooling by multihead attention: learned seeds attend to the set. Permutation-invariant.

    With ONE seed the coupling is a single row. A column step turns it into the uniform row whatever the scores are, and
    the row step after it keeps that, so from the third half-step on Sinkhorn pooling is exactly the mean of the values,
    and neither the seed nor the keys matter or learn through it. (Two half-steps give the uniform row too.)
    Softmax pooling has no such collapse.

    Args:
        dim: width of input and block.
        num_heads: number of heads.
        num_seeds: number of learned seeds.
        **options: as for `MAB`.
    """

    def __init__(self, dim: int, num_heads: int = 4, num_seeds: int = 1, **options: object) -> None:
        super().__init__()
        self.seeds = nn.Parameter(nn.init.xavier_uniform_(torch.empty(1, num_seeds, dim)))
        self.attention = MAB(dim, dim, dim, num_heads, **options)  # type: ignore[arg-type]

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """(B, n, dim) and a mask (B, n), True = a real token -> (B, num_seeds, dim)."""
        return self.attention(self.seeds.expand(x.shape[0], -1, -1), x, key_mask=mask)


def hide(x: Tensor, mask: Tensor | None) -> Tensor:
    """Zeroes the tokens of `x` (B, n, d) that `mask` (B, n) leaves out."""
    return x if mask is None else x.masked_fill(~mask.unsqueeze(-1), 0.0)


def valid_count(mask: Tensor) -> Tensor:
    """Number of valid tokens, (B, 1), at least 1 so that it may divide."""
    return mask.sum(-1, keepdim=True).clamp(min=1)


def check_token_mask(name: str, mask: Tensor | None, tokens: Tensor) -> None:
    """Raises ValueError unless `mask` is None or a boolean (B, n) for tokens (B, n, d)."""
    if mask is None:
        return
    shape = tuple(tokens.shape[:2])
    if mask.dtype != torch.bool:
        raise ValueError(f"{name} must be boolean, True = a real point, got {mask.dtype}")
    if tuple(mask.shape) != shape:
        raise ValueError(f"{name} must have the shape {shape} of the tokens it belongs to, got {tuple(mask.shape)}")


def check_points(points: Tensor, mask: Tensor | None, features: int = 0) -> None:
    """Checks a batch of clouds at a model's entry.

    Raises:
        ValueError: unless points are floating (B, n, 3 + features) with n >= 1, and the mask None or boolean (B, n).
    """
    width = 3 + features
    if points.dim() != 3 or points.shape[-1] != width or not points.is_floating_point():
        hint = "" if not features else f", 3 coordinates and {features} features"
        raise ValueError(
            f"points must be floating, (batch, points, {width}){hint}, got {tuple(points.shape)} {points.dtype}"
        )
    if points.shape[1] == 0:
        raise ValueError("points holds clouds without a single point; leave empty clouds out, or pad and mask them")
    check_token_mask("mask", mask, points)


def check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    """Raises ValueError unless `value` is one of `choices`."""
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}, got {value!r}")
