"""How heads of different cases of the guard share a chunk."""

import pytest
import torch
from sinkhorn_attention import dense, guard, sinkhorn, sinkhorn_attention
from sinkhorn_attention.guard import BOUNDED, LOG_DOMAIN, SHIFTED, merge_modes, runs


@pytest.mark.parametrize(
    ("modes", "merged"),
    [
        ([0, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0]),
        ([0, 1, 1, 0, 0, 0], [0, 1, 1, 0, 0, 0]),  # three pieces
        ([0, 1, 0, 1, 0, 0], [1, 1, 1, 1, 1, 1]),
        ([0, 1, 0, 1, 0, 0, 0, 0], [1, 1, 1, 1, 1, 1, 0, 0]),  # the next chunk is left as it is
        ([1], [1]),
    ],
)
def test_scattered_heads_are_shifted_with_their_chunk(modes: list[int], merged: list[int]) -> None:
    mode = torch.tensor(modes, dtype=torch.uint8)
    merge_modes(mode, 6)
    assert mode.tolist() == merged
    pieces = runs(mode.tolist(), 6)
    assert all(len({merged[head] for head in range(piece.start, piece.stop)}) == 1 for piece, _ in pieces)
    assert [head for piece, _ in pieces for head in range(piece.start, piece.stop)] == list(range(len(modes)))


@pytest.mark.parametrize("n_iters", [1, 4, 5])
def test_mixed_heads_match_the_reference(make_problem, matches_reference, n_iters: int) -> None:
    """Bounded, shifted and log-domain heads side by side, in forward's chunks and in backward's."""
    problem = make_problem(12, 9, n_iters, lead=(4, 8))
    problem.query[:, 1::2] *= 30
    problem.query[2, 3] *= 1e4
    options = n_iters, 8**-0.5, False, None, None, None, None, 0.0
    with torch.no_grad():
        mode = dense.attention_forward(*(tensor.float() for tensor in problem[:3]), *options)[3].view(4, 8)
    assert (mode != BOUNDED).all(), "one chunk, and every head of it is shifted"
    assert (mode[0] == SHIFTED).all()
    matches_reference(problem)
    matches_reference(problem, dtype=torch.float32, tolerance=1e-3)


def test_no_head_is_cut_off_from_its_chunk(monkeypatch) -> None:
    """One piece for each chunk, of attention and of couplings: half as many more calls cost half as much time again."""
    pieces = []

    def counted(modes: list[int], size: int) -> list:
        pieces.extend(runs(modes, size))
        return runs(modes, size)

    monkeypatch.setattr(dense, "runs", counted)
    query, key, value = (torch.randn(16, 10, 8) for _ in range(3))
    query[::2] *= 30
    sinkhorn_attention(query, key, value, 3)
    sinkhorn(query @ key.mT, 3)
    assert len(pieces) == 2
    assert guard.MAX_PIECES > 1
    assert LOG_DOMAIN not in {mode for _, mode in pieces}
