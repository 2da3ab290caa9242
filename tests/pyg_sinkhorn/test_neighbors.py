import pytest
import torch
from pyg_sinkhorn import farthest_point_sample, knn
from pyg_sinkhorn.neighbors import gather_points
from sklearn.neighbors import NearestNeighbors


def cloud(*shape, seed=0):
    return torch.randn(*shape, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def naive_farthest(points, k, start):
    chosen = [start]
    while len(chosen) < k:
        nearest = [min((points[i] - points[j]).norm().item() for j in chosen) for i in range(len(points))]
        chosen.append(max((i for i in range(len(points)) if i not in chosen), key=lambda i: nearest[i]))
    return chosen


@pytest.mark.parametrize("block_elements", [1, 100, 10**6])
def test_neighbours_are_scikit_learns(block_elements):
    queries, points = cloud(2, 17), cloud(2, 23, seed=1)
    found = knn(queries, points, 5, block_elements=block_elements)
    for b in range(2):
        expected = NearestNeighbors(n_neighbors=5).fit(points[b]).kneighbors(queries[b], return_distance=False)
        assert found[b].tolist() == expected.tolist()


def test_a_point_is_its_own_nearest_neighbour():
    points = cloud(2, 9)
    assert (knn(points, points, 3)[..., 0] == torch.arange(9)).all()


@pytest.mark.parametrize("filling", [float("nan"), 0.0])
def test_padding_is_never_a_neighbour(filling, ragged):
    points, mask, sizes = ragged
    points = points.nan_to_num(filling)
    found = knn(points, points, 4, mask)
    for b, n in enumerate(sizes):
        expected = NearestNeighbors(n_neighbors=4).fit(points[b, :n]).kneighbors(points[b, :n], return_distance=False)
        assert found[b, :n].tolist() == expected.tolist()


def test_surplus_slots_repeat_the_nearest(ragged):
    points, mask, _ = ragged
    found = knn(points, points, 8, mask)[1, :5]  # the second cloud has 5 points
    assert (found[:, :5].sort().values == torch.arange(5)).all()
    assert (found[:, 5:] == found[:, :1]).all()


def lattice(n):
    """Points of a grid in some order: most distances occur many times."""
    grid = torch.cartesian_prod(*[torch.arange(5.0)] * 3) / 3
    return grid[torch.randperm(125, generator=torch.Generator().manual_seed(0))[:n]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("before", [0, 37])
def test_equally_near_points_do_not_depend_on_the_padding(dtype, before):
    """Where topk and a rounded centroid decide ties, a padded cloud has other neighbours than the cloud alone."""
    alone = lattice(90).to(dtype)[None]
    padded = torch.zeros(1, 490, 3, dtype=dtype)
    padded[:, before : before + 90] = alone
    mask = torch.zeros(1, 490, dtype=torch.bool)
    mask[:, before : before + 90] = True
    found = knn(alone, alone, 8)
    assert torch.equal(knn(alone, padded, 8, mask) - before, found)
    assert torch.equal(farthest_point_sample(padded, 20, mask) - before, farthest_point_sample(alone, 20))
    distances = torch.cdist(alone, alone, compute_mode="donot_use_mm_for_euclid_dist")[0]
    for row, neighbors in enumerate(found[0].tolist()):
        by_distance = sorted(range(90), key=lambda j, row=row: (distances[row, j].item(), j))
        assert neighbors == by_distance[:8]


def test_points_out_of_reach_come_before_padding():
    """Their distance overflows to inf, which is what padding has, too."""
    points = torch.tensor([[[0.0, 0, 0], [3e38, 0, 0], [-3e38, 0, 0], [1, 0, 0]]])
    mask = torch.tensor([[True, True, True, False]])
    assert knn(points, points, 3, mask)[0].tolist()[1] == [1, 0, 2]


def test_neighbours_far_from_the_origin_keep_their_order():
    # With |a|² + |b|² - 2ab in float32 these distances would all be rounding.
    points = torch.tensor([[[1000.0 + 0.01 * i, -1000.0, 1000.0] for i in range(30)]])
    found = knn(points[:, :1], points, 30)
    assert found[0, 0].tolist() == list(range(30))


def test_large_clouds_do_not_hold_the_distance_matrix(monkeypatch):
    sizes = []
    cdist = torch.cdist
    monkeypatch.setattr(
        torch, "cdist", lambda a, b, **kw: (sizes.append(a.shape[1] * b.shape[1]), cdist(a, b, **kw))[1]
    )
    points = cloud(1, 3000).float()
    knn(points, points, 2)
    assert sum(sizes) == 3000**2
    assert max(sizes) <= 2**22


@pytest.mark.parametrize("k", [1, 6, 12])
def test_farthest_points_are_those_of_the_naive_loop(k):
    points = cloud(3, 12)
    found = farthest_point_sample(points, k)
    for b in range(3):
        start = (points[b] - points[b].mean(0)).norm(dim=-1).argmax().item()
        assert found[b].tolist() == naive_farthest(points[b], k, start)


def test_a_seed_decides_a_random_start():
    points = cloud(4, 30)

    def sample(seed):
        return farthest_point_sample(points, 6, generator=torch.Generator().manual_seed(seed))

    assert torch.equal(sample(1), sample(1))
    assert len({tuple(sample(seed)[:, 0].tolist()) for seed in range(5)}) > 1
    for b, chosen in enumerate(sample(2).tolist()):
        assert chosen == naive_farthest(points[b], 6, chosen[0])


def test_every_real_point_may_start():
    mask = torch.tensor([[False, True, True, False, True]])
    points, generator = cloud(1, 5), torch.Generator().manual_seed(0)
    starts = {farthest_point_sample(points, 1, mask, generator=generator).item() for _ in range(60)}
    assert starts == {1, 2, 4}


@pytest.mark.parametrize("seed", [None, 0])
def test_padding_is_never_sampled_and_changes_nothing(ragged, seed):
    points, mask, sizes = ragged
    points = points + 10  # zeros in the padding would be the farthest of all

    def sample(points, mask=None):
        # One cloud at a time: a batch draws one number per cloud.
        generator = None if seed is None else torch.Generator().manual_seed(seed)
        return farthest_point_sample(points, 5, mask, generator=generator)

    for b, n in enumerate(sizes):
        assert torch.equal(sample(points[b : b + 1], mask[b : b + 1]), sample(points[b : b + 1, :n]))


def test_surplus_samples_repeat_the_first(ragged):
    points, mask, _ = ragged
    found = farthest_point_sample(points, 8, mask)[1]
    assert found[:5].sort().values.tolist() == [0, 1, 2, 3, 4]
    assert (found[5:] == found[0]).all()


def test_repeated_points_are_each_taken_once():
    found = farthest_point_sample(torch.zeros(1, 6, 3), 6)
    assert sorted(found[0].tolist()) == [0, 1, 2, 3, 4, 5]


def test_the_sample_does_not_depend_on_the_order_of_the_points():
    points, order = cloud(2, 20), torch.randperm(20, generator=torch.Generator().manual_seed(0))
    straight = gather_points(points, farthest_point_sample(points, 7))
    shuffled = gather_points(points[:, order], farthest_point_sample(points[:, order], 7))
    assert torch.equal(straight, shuffled)
    straight = gather_points(points, knn(points[:, :3], points, 6))
    shuffled = gather_points(points[:, order], knn(points[:, :3], points[:, order], 6))
    assert torch.equal(straight, shuffled)


def test_clouds_without_points_give_valid_indices():
    mask = torch.zeros(2, 5, dtype=torch.bool)
    for found in (farthest_point_sample(cloud(2, 5), 3, mask), knn(cloud(2, 4), cloud(2, 5), 3, mask)):
        assert ((found >= 0) & (found < 5)).all()


def test_gather_points():
    x = torch.arange(24.0).view(2, 4, 3)
    indices = torch.tensor([[[0, 3], [1, 1]], [[2, 0], [3, 2]]])
    expected = torch.stack([x[b][indices[b]] for b in range(2)])
    assert torch.equal(gather_points(x, indices), expected)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda p: knn(p, p, 6), "k must lie between 1 and the number of points, 5, got 6"),
        (lambda p: knn(p, p, 0), "k must lie between 1"),
        (lambda p: farthest_point_sample(p, 6), "k must lie between 1 and the number of points, 5, got 6"),
        (lambda p: knn(p[0], p, 2), r"query_points must be floating, \(batch, points, dim\), got \(5, 3\)"),
        (lambda p: knn(p[:1], p, 2), r"must agree in B and d, got \(1, 5, 3\) and \(2, 5, 3\)"),
        (lambda p: knn(p, p[..., :2], 2), "must agree in B and d"),
        (lambda p: farthest_point_sample(p.long(), 2), r"points must be floating.*torch\.int64"),
        (lambda p: farthest_point_sample(p[:, :0], 1), "points holds clouds without a single point"),
        (lambda p: farthest_point_sample(p, 2, torch.ones(2, 5)), "mask must be boolean, True = a real point"),
        (lambda p: knn(p, p, 2, torch.ones(2, 4, dtype=torch.bool)), r"of shape \(2, 5\), got \(2, 4\)"),
    ],
)
def test_bad_input_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call(cloud(2, 5))
