"""A call with its leading dimensions flattened to `heads`, for the portable engine: sliced by heads and by rows."""

import math
from functools import cached_property

import torch
from torch import Tensor

from .problem import Problem, dropout_factor, keep_factor

LOG2E = math.log2(math.e)
#: Some heads: neighbours, or any by their indices.
Group = slice | Tensor
ALL_ROWS = slice(None)


def hide(tokens: Tensor, mask: Tensor | None, group: Group) -> Tensor:
    """Zeroes tokens (heads, length, d) where the mask (all heads, length) is False: padding may hold anything."""
    return tokens if mask is None else tokens.masked_fill(~mask[group].unsqueeze(2), 0.0)


class Heads:
    """Views of one call's tensors, (heads, length, ...), and what is made of them for some heads.

    Args:
        problem: the call.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        lead, self.n, self.m, self.dtype = problem.lead, problem.n, problem.m, problem.dtype
        self.count, self.device = problem.heads, problem.like.device
        self.scale, self.n_iters, self.keep_factor = problem.scale, problem.n_iters, keep_factor(problem.dropout_p)
        self.query_mask, self.key_mask = (
            None if mask is None else mask.expand(*lead, length).reshape(-1, length)
            for mask, length in ((problem.query_mask, self.n), (problem.key_mask, self.m))
        )
        self.query, self.key, self.value, self.scores, self.keep = (
            None if tensor is None else tensor.reshape(self.count, *tensor.shape[-2:])
            for tensor in (problem.query, problem.key, problem.value, problem.scores, problem.dropout_keep)
        )
        #: Whether masked tokens stand as zeros; see `domains.padding_may_stay`.
        self.hides_padding = self.query_mask is not None or self.key_mask is not None
        self.attn_bias = self.bias_head = None
        if problem.attn_bias is not None:
            # The bias stays as small as it came: bias_head[h] says which of its matrices belongs to head h.
            bias = problem.attn_bias
            matrices = (1,) * (len(lead) + 2 - bias.dim()) + bias.shape[:-2]
            self.attn_bias = bias.reshape(-1, *bias.shape[-2:])
            index = torch.arange(self.attn_bias.shape[0], device=bias.device).view(matrices)
            self.bias_head = index.expand(lead).reshape(-1)

    def queries(self, group: Group, dtype: torch.dtype | None = None) -> Tensor:
        """The queries of some heads, (heads, n, d), zero where masked."""
        assert self.query is not None
        return self.hide_queries(self.query[group].to(dtype or self.dtype), group)

    def keys(self, group: Group, dtype: torch.dtype | None = None) -> Tensor:
        """The keys of some heads, (heads, m, d), zero where masked."""
        assert self.key is not None
        return self.hide_keys(self.key[group].to(dtype or self.dtype), group)

    def values(self, group: Group, dtype: torch.dtype | None = None) -> Tensor:
        """The values of some heads, (heads, m, d_v), zero where masked."""
        assert self.value is not None
        return self.hide_keys(self.value[group].to(dtype or self.dtype), group)

    def hide_queries(self, tokens: Tensor, group: Group) -> Tensor:
        """What belongs to the queries of some heads (heads, n, d), zero where masked unless padding may stay."""
        return hide(tokens, self.query_mask if self.hides_padding else None, group)

    def hide_keys(self, tokens: Tensor, group: Group) -> Tensor:
        """What belongs to the keys of some heads (heads, m, d), likewise."""
        return hide(tokens, self.key_mask if self.hides_padding else None, group)

    @cached_property
    def norms(self) -> tuple[Tensor, Tensor]:
        """Norms of all queries (heads, n) and keys (heads, m), of what lies in the padding too."""
        assert self.query is not None
        assert self.key is not None
        norm = torch.linalg.vector_norm
        return norm(self.query.to(self.dtype), dim=2), norm(self.key.to(self.dtype), dim=2)

    def bias(self, group: Group, rows: slice = ALL_ROWS, dtype: torch.dtype | None = None) -> Tensor | None:
        """The bias of some heads and rows, (heads or 1, rows or 1, m or 1)."""
        if self.attn_bias is None or self.bias_head is None:
            return None
        bias = self.attn_bias if self.attn_bias.shape[0] == 1 else self.attn_bias[self.bias_head[group]]
        return (bias if bias.shape[1] == 1 else bias[:, rows]).to(dtype or self.dtype)

    def kept(self, group: Group, rows: slice = ALL_ROWS) -> Tensor | None:
        """Which entries of the coupling of some heads and rows stay, (heads, rows, m); None without dropout.

        Maps are multiplied with it, and with `keep_factor` what is smaller: the values, or the product.
        """
        return None if self.keep is None else self.keep[group][:, rows]

    def dropout(self, group: Group, rows: slice = ALL_ROWS, dtype: torch.dtype | None = None) -> Tensor | None:
        """What multiplies the coupling of some heads and rows, (heads, rows, m); None without dropout."""
        if self.keep is None:
            return None
        return dropout_factor(self.keep[group][:, rows], self.problem.dropout_p, dtype or self.dtype)

    def mask_scores_(self, scores: Tensor, group: Group, rows: slice = ALL_ROWS) -> Tensor:
        """Puts -inf into masked rows and columns of scores (heads, rows, m)."""
        if self.query_mask is not None:
            scores.masked_fill_(~self.query_mask[group][:, rows].unsqueeze(2), -math.inf)
        if self.key_mask is not None:
            scores.masked_fill_(~self.key_mask[group].unsqueeze(1), -math.inf)
        return scores

    def targets(self, group: Group) -> tuple[Tensor | None, Tensor | None, Tensor, bool]:
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
        return rows[group], columns[group], ratio[group], has_empty

    @cached_property
    def _masked_targets(self) -> tuple[Tensor, Tensor, Tensor, bool]:
        """The targets of all heads: once for each call, which is cheaper than for each chunk."""
        full = torch.ones(self.count, 1, 1, dtype=torch.bool)
        rows = full if self.query_mask is None else self.query_mask.unsqueeze(1)
        columns = full if self.key_mask is None else self.key_mask.unsqueeze(1)
        n_valid = rows.sum(2, keepdim=True) * (self.n if rows is full else 1)
        m_valid = columns.sum(2, keepdim=True) * (self.m if columns is full else 1)
        ratio = target_ratio(n_valid, m_valid, self.dtype)
        empty = (n_valid == 0) | (m_valid == 0)
        return (rows & ~empty).to(self.dtype), ratio * (columns & ~empty), ratio, bool(empty.any())


def target_ratio(n_valid: Tensor, m_valid: Tensor, dtype: torch.dtype) -> Tensor:
    """What a column should sum to, n_valid / m_valid, from counts; 1 where nothing is valid, so that it divides."""
    return torch.where(n_valid > 0, n_valid.to(dtype) / m_valid.clamp(min=1), 1.0)


def row_spans(n: int, size: int) -> list[slice]:
    """The rows in blocks of at most `size`."""
    return [slice(start, min(start + size, n)) for start in range(0, n, size)]


class Gradients:
    """The gradients of a call, filled head by head.

    Args:
        problem: the call.
        bias_gradient: whether that of the bias is wanted.
    """

    def __init__(self, problem: Problem, bias_gradient: bool) -> None:
        self.problem = problem
        # Contiguous, as the fake kernel promises, whatever the inputs' strides are.
        self.of_inputs = [
            tensor.new_empty(problem.heads, *tensor.shape[-2:])
            for tensor in (problem.query, problem.key, problem.value, problem.scores)
            if tensor is not None
        ]
        self.bias: Tensor | None = None
        if bias_gradient and problem.attn_bias is not None:
            shape = problem.attn_bias.shape
            self.bias = problem.like.new_zeros(math.prod(shape[:-2]), *shape[-2:], dtype=problem.dtype)

    @cached_property
    def heads(self) -> Heads:
        """The call's heads, whose tensors may be copies: made when they are asked for."""
        return Heads(self.problem)

    def parts(self, group: Group, dtype: torch.dtype) -> list[Tensor]:
        """Where the gradients of some heads may be written before `put`: of query, key and value, or of the scores."""
        if isinstance(group, slice) and self.of_inputs[0].dtype == dtype:
            return [gradient[group] for gradient in self.of_inputs]
        return [torch.empty_like(gradient[group], dtype=dtype) for gradient in self.of_inputs]

    def put(self, group: Group, parts: list[Tensor]) -> None:
        """Takes the gradients of some heads to the inputs; masked values get zeros."""
        if len(parts) == 3:
            parts = [*parts[:2], self.heads.hide_keys(parts[2], group)]
        for gradient, part in zip(self.of_inputs, parts, strict=True):
            if not isinstance(group, slice) or part.data_ptr() != gradient[group].data_ptr():
                gradient[group] = part.to(gradient.dtype)

    def add_block(self, group: Group, rows: slice, scores: Tensor, tokens: tuple[Tensor, Tensor], parts: list) -> None:
        """Takes dL/dC of a block of rows (heads, rows, m) to the parts of query and key, and to the bias.

        Args:
            group: the heads.
            rows: the block; blocks come in order.
            scores: dL/dC; zero at masked tokens.
            tokens: all queries and keys of these heads.
            parts: what `parts` gave.
        """
        scale, beta = self.heads.scale, int(rows.start > 0)
        query, key = tokens
        torch.baddbmm(parts[0][:, rows], scores, key, beta=0, alpha=scale, out=parts[0][:, rows])
        torch.baddbmm(parts[1], scores.transpose(1, 2), query[:, rows], beta=beta, alpha=scale, out=parts[1])
        if self.bias is None or self.heads.bias_head is None:
            return
        for axis in (1, 2):
            if self.bias.shape[axis] == 1:
                scores = scores.sum(axis, keepdim=True)
        bias = self.bias if self.bias.shape[1] == 1 else self.bias[:, rows]
        bias.index_add_(0, self.heads.bias_head[group], scores.to(bias.dtype))

    def result(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The gradients in the shapes of the call's tensors, as `engines.Engine.backward` gives them."""
        problem, nothing = self.problem, [self.problem.like.new_empty(0) for _ in range(4)]
        if problem.scores is not None:
            return self.of_inputs[0].view(problem.scores.shape), nothing[0], nothing[1], nothing[2]
        shapes = [tensor.shape for tensor in (problem.query, problem.key, problem.value) if tensor is not None]
        query, key, value = (part.view(shape) for part, shape in zip(self.of_inputs, shapes, strict=True))
        if self.bias is None or problem.attn_bias is None:
            return query, key, value, nothing[0]
        return query, key, value, self.bias.view(problem.attn_bias.shape).to(problem.attn_bias.dtype)
