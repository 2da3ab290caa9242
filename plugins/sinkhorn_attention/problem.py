"""One attention call as every engine sees it: leading dimensions flattened to heads, padding hidden, chunks cut."""

import math
from functools import cached_property

import torch
from torch import Tensor

LOG2E = math.log2(math.e)


def dropout_factor(keep: Tensor, dropout_p: float, dtype: torch.dtype) -> Tensor:
    """What multiplies the coupling: 1 / (1 - p) where kept, 0 elsewhere."""
    return keep.to(dtype).mul_(0.0 if dropout_p >= 1 else 1 / (1 - dropout_p))


def hide(tokens: Tensor, mask: Tensor | None, heads: slice | Tensor) -> Tensor:
    """Zeroes tokens (heads, length, d) where the mask (all heads, length) is False: padding may hold anything."""
    return tokens if mask is None else tokens.masked_fill(~mask[heads].unsqueeze(2), 0.0)


class Problem:
    """Views of one call's tensors with the leading dimensions flattened to `heads`, sliced chunk by chunk.

    Either (query, key) with an optional bias or given scores make the matrices; see `scores`.

    Args:
        lead: the leading dimensions.
        n: number of queries.
        m: number of keys.
        dtype: of the arithmetic.
        query_mask: broadcastable to (lead..., n), True = takes part.
        key_mask: broadcastable to (lead..., m), likewise.
        query: (lead..., n, d).
        key: (lead..., m, d).
        value: (lead..., m, d_v).
        scale: factor of the scores.
        attn_bias: broadcastable to (lead..., n, m), floating, -inf = no support.
        dropout_keep: (lead..., n, m), boolean.
        dropout_p: probability of dropping.
        given_scores: (lead..., n, m), in place of query, key, scale and bias.
    """

    def __init__(
        self,
        lead: torch.Size,
        n: int,
        m: int,
        dtype: torch.dtype,
        query_mask: Tensor | None,
        key_mask: Tensor | None,
        query: Tensor | None = None,
        key: Tensor | None = None,
        value: Tensor | None = None,
        scale: float = 1.0,
        attn_bias: Tensor | None = None,
        dropout_keep: Tensor | None = None,
        dropout_p: float = 0.0,
        given_scores: Tensor | None = None,
    ) -> None:
        self.heads, self.n, self.m = math.prod(lead), n, m
        #: Whether masked tokens stand as zeros; see `guard.must_hide_padding`.
        self.hides_padding = query_mask is not None or key_mask is not None
        self.dtype = dtype
        self.scale = scale
        self.query_mask = None if query_mask is None else query_mask.expand(*lead, n).reshape(-1, n)
        self.key_mask = None if key_mask is None else key_mask.expand(*lead, m).reshape(-1, m)
        self.query = None if query is None else query.reshape(self.heads, n, query.shape[-1])
        self.key = None if key is None else key.reshape(self.heads, m, key.shape[-1])
        self.value = None if value is None else value.reshape(self.heads, m, value.shape[-1])
        self.keep = None if dropout_keep is None else dropout_keep.reshape(self.heads, n, m)
        self.dropout_p = dropout_p
        self.given_scores = None if given_scores is None else given_scores.reshape(self.heads, n, m)
        self.attn_bias = self.bias_head = None
        if attn_bias is not None:
            # The bias stays as small as it came: bias_head[h] says which of its matrices belongs to head h.
            bias_lead = (1,) * (len(lead) + 2 - attn_bias.dim()) + attn_bias.shape[:-2]
            self.attn_bias = attn_bias.reshape(-1, *attn_bias.shape[-2:])
            index = torch.arange(self.attn_bias.shape[0], device=attn_bias.device).view(bias_lead)
            self.bias_head = index.expand(lead).reshape(-1)

    def queries(self, heads: slice | Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """The queries of some heads, (heads, n, d), zero where masked."""
        assert self.query is not None
        return self.hide_rows(self.query[heads].to(dtype or self.dtype), heads)

    def keys(self, heads: slice | Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """The keys of some heads, (heads, m, d), zero where masked."""
        assert self.key is not None
        return self.hide_columns(self.key[heads].to(dtype or self.dtype), heads)

    def values(self, heads: slice | Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """The values of some heads, (heads, m, d_v), zero where masked."""
        assert self.value is not None
        return self.hide_columns(self.value[heads].to(dtype or self.dtype), heads)

    @cached_property
    def norms(self) -> tuple[Tensor, Tensor]:
        """Norms of all queries (heads, n) and keys (heads, m), of what lies in the padding too."""
        assert self.query is not None
        assert self.key is not None
        norm = torch.linalg.vector_norm
        return norm(self.query.to(self.dtype), dim=2), norm(self.key.to(self.dtype), dim=2)

    def hide_rows(self, tokens: Tensor, heads: slice | Tensor) -> Tensor:
        """What belongs to the queries of some heads (heads, n, d), zero where masked unless padding may stay."""
        return hide(tokens, self.query_mask if self.hides_padding else None, heads)

    def hide_columns(self, tokens: Tensor, heads: slice | Tensor) -> Tensor:
        """What belongs to the keys of some heads (heads, m, d), likewise."""
        return hide(tokens, self.key_mask if self.hides_padding else None, heads)

    def bias(self, heads: slice | Tensor, dtype: torch.dtype | None = None) -> Tensor | None:
        """The bias of some heads, (heads, n or 1, m or 1)."""
        if self.attn_bias is None or self.bias_head is None:
            return None
        if self.attn_bias.shape[0] == 1:
            return self.attn_bias.to(dtype or self.dtype)
        return self.attn_bias[self.bias_head[heads]].to(dtype or self.dtype)

    def dropout(
        self, heads: slice | Tensor, dtype: torch.dtype | None = None, rows: slice | None = None
    ) -> Tensor | None:
        """What multiplies the coupling of some heads (and rows), (heads, n, m); None without dropout."""
        if self.keep is None:
            return None
        keep = self.keep[heads] if rows is None else self.keep[heads, rows]
        return dropout_factor(keep, self.dropout_p, dtype or self.dtype)

    def scores(self, heads: slice | Tensor, dtype: torch.dtype, unit: float, rows: slice = slice(None)) -> Tensor:
        """The scores times `unit` of some heads and rows, a new tensor (heads, n, m); -inf outside the support."""
        if self.given_scores is None:
            queries = self.queries(heads, dtype)[:, rows] * (self.scale * unit)
            scores = torch.bmm(queries, self.keys(heads, dtype).transpose(1, 2))
            bias = self.bias(heads, dtype)
            if bias is not None:
                scores.add_(bias if bias.shape[1] == 1 else bias[:, rows], alpha=unit)
        else:
            scores = self.given_scores[heads][:, rows].to(dtype) * unit
        self.hide_scores_(scores, heads, rows)
        return scores

    def hide_scores_(self, scores: Tensor, heads: slice | Tensor, rows: slice = slice(None)) -> None:
        """Puts -inf into masked rows and columns of scores (heads, n, m), or of some rows."""
        if self.query_mask is not None:
            scores.masked_fill_(~self.query_mask[heads][:, rows].unsqueeze(2), -math.inf)
        if self.key_mask is not None:
            scores.masked_fill_(~self.key_mask[heads].unsqueeze(1), -math.inf)

    def targets(self, heads: slice | Tensor) -> tuple[Tensor | None, Tensor | None, Tensor, bool]:
        """What rows and columns should sum to by the masks, for maps without a -inf.

        Returns:
            The row sums, broadcastable to (heads, 1, n), 1 or 0, None if 1 throughout; the column sums, broadcastable
            to (heads, 1, m), n_valid / m_valid or 0, None if 1 throughout; n_valid / m_valid, (heads, 1, 1), 1 where
            nothing is valid, so that it divides; and whether a head has nothing valid.
        """
        if self.query_mask is None and self.key_mask is None:
            ratio = torch.full((1, 1, 1), self.n / self.m, dtype=self.dtype)
            return None, None if self.n == self.m else ratio, ratio, False
        rows, columns, ratio, has_empty = self._masked_targets
        return rows[heads], columns[heads], ratio[heads], has_empty

    @cached_property
    def _masked_targets(self) -> tuple[Tensor, Tensor, Tensor, bool]:
        """The targets of all heads: once for each call, which is cheaper than for each chunk."""
        full = torch.ones(self.heads, 1, 1, dtype=torch.bool)
        rows = full if self.query_mask is None else self.query_mask.unsqueeze(1)
        columns = full if self.key_mask is None else self.key_mask.unsqueeze(1)
        n_valid = rows.sum(2, keepdim=True) * (self.n if rows is full else 1)
        m_valid = columns.sum(2, keepdim=True) * (self.m if columns is full else 1)
        ratio = torch.where(n_valid > 0, n_valid.to(self.dtype) / m_valid.clamp(min=1), 1.0)
        empty = (n_valid == 0) | (m_valid == 0)
        return (rows & ~empty).to(self.dtype), ratio * (columns & ~empty), ratio, bool(empty.any())


class Gradients:
    """The gradients of an attention call, filled head by head."""

    def __init__(self, problem: Problem, bias_gradient: bool) -> None:
        self.problem = problem
        tensors = problem.query, problem.key, problem.value
        # Contiguous, as the fake kernel promises, whatever the inputs' strides are.
        self.query, self.key, self.value = (
            torch.empty_like(tensor, memory_format=torch.contiguous_format) for tensor in tensors if tensor is not None
        )
        self.bias: Tensor | None = None
        if bias_gradient and problem.attn_bias is not None:
            shape, device = problem.attn_bias.shape, problem.attn_bias.device
            self.bias = torch.zeros(shape, dtype=problem.dtype, device=device)

    def write(self, heads: Tensor | slice, query: Tensor, key: Tensor, scores: Tensor, value: Tensor) -> None:
        """Takes dL/dC (heads, n, m) and dL/dV of some heads to the inputs. Masked tokens have zeros in dL/dC."""
        scale = self.problem.scale
        self._put(self.query, heads, scores, key, scale)
        self._put(self.key, heads, scores.transpose(1, 2), query, scale)
        value = self.problem.hide_columns(value, heads)
        if value.data_ptr() != self.value[heads].data_ptr():
            self.value[heads] = value.to(self.value.dtype)
        self.add_bias(heads, scores)

    def value_of(self, heads: slice) -> Tensor:
        """Where dL/dV of some heads may be written before `write`, in the dtype of the arithmetic."""
        part = self.value[heads]
        return part if part.dtype == self.problem.dtype else torch.empty_like(part, dtype=self.problem.dtype)

    def parts_of(self, heads: slice) -> list[Tensor]:
        """Where the gradients of some heads may be written before `put`, in the dtype of the arithmetic."""
        parts = [gradient[heads] for gradient in (self.query, self.key, self.value)]
        dtype = self.problem.dtype
        return [part if part.dtype == dtype else torch.empty_like(part, dtype=dtype) for part in parts]

    def put(self, heads: slice, query: Tensor, key: Tensor, value: Tensor) -> None:
        """Takes the gradients of some heads to the inputs; masked values get zeros."""
        value = hide(value, self.problem.key_mask, heads)
        for gradient, part in ((self.query, query), (self.key, key), (self.value, value)):
            if part.data_ptr() != gradient[heads].data_ptr():
                gradient[heads] = part.to(gradient.dtype)

    def like(
        self, query: Tensor, key: Tensor, value: Tensor, attn_bias: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The gradients in the shapes of the call's tensors, the bias's in its dtype, or empty if it is not wanted."""
        tokens = self.query.view(query.shape), self.key.view(key.shape), self.value.view(value.shape)
        if self.bias is None or attn_bias is None:
            return *tokens, query.new_empty(0, dtype=self.problem.dtype)
        return *tokens, self.bias.view(attn_bias.shape).to(attn_bias.dtype)

    def add_bias(self, heads: Tensor | slice, scores: Tensor, rows: slice | None = None) -> None:
        """Adds dL/dC of some heads (and rows) to the gradient of the bias, if it is wanted."""
        if self.bias is None or self.problem.bias_head is None:
            return
        for axis in (1, 2):
            if self.bias.shape[axis] == 1:
                scores = scores.sum(axis, keepdim=True)
        bias = self.bias if rows is None or self.bias.shape[1] == 1 else self.bias[:, rows]
        bias.index_add_(0, self.problem.bias_head[heads], scores.to(bias.dtype))

    @staticmethod
    def _put(gradient: Tensor, heads: Tensor | slice, left: Tensor, right: Tensor, scale: float) -> None:
        if isinstance(heads, slice) and gradient.dtype == left.dtype:
            part = gradient[heads]
            torch.baddbmm(part, left, right, beta=0, alpha=scale, out=part)
        else:
            gradient[heads] = torch.bmm(left, right).mul_(scale).to(gradient.dtype)
