"""The arithmetic of the Sinkformers' published code, retyped from its description: what ours is measured against.

Normalisation in the log domain with masses 1/n and 1/m, in which a half-step adds to the potential that it replaces,
every map kept for autograd, and the number of keys as a final factor (Sander et al. 2022, appendix B).
"""

import math

import torch
from torch import Tensor


def published_attention(query: Tensor, key: Tensor, value: Tensor, n_iters: int) -> Tensor:
    """Sinkhorn attention of query (..., n, d), key (..., m, d) and value (..., m, d_v) for an odd number of half-steps.

    Raises:
        ValueError: for an even number, after which the published factor is not the one that makes columns sum to 1.
    """
    if n_iters % 2 == 0:
        raise ValueError(f"the published code's counts of half-steps are odd, got {n_iters}")
    scores = query @ key.transpose(-1, -2) * query.shape[-1] ** -0.5
    n, m = scores.shape[-2:]
    f, g = torch.zeros_like(scores[..., 0]), torch.zeros_like(scores[..., 0, :])
    for step in range(n_iters):
        log_map = scores + f.unsqueeze(-1) + g.unsqueeze(-2)
        if step % 2 == 0:
            f = -math.log(n) - log_map.logsumexp(-1) + f
        else:
            g = -math.log(m) - log_map.logsumexp(-2) + g
    return (scores + f.unsqueeze(-1) + g.unsqueeze(-2)).exp() * n @ value
