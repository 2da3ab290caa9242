"""What runs say of the paper's claims: each verdict from numbers that allow it, and none from numbers that do not."""

import json
import math

import numpy as np
import pytest
from scipy import stats

from experiments.report.cells import analyse
from experiments.report.claims import Says, claim_table, findings
from experiments.report.collect import collect
from experiments.report.published import Claim, Kind, Status, load_paper

SOFTMAX = [0.80, 0.81, 0.82, 0.80, 0.81]


@pytest.fixture
def results(tmp_path):
    def make(experiment="mnist_patches"):
        runs, problems = collect([tmp_path / "runs" / experiment])
        return analyse(experiment, runs, problems)

    return make


def claim(kind, bound=None, experiments=("mnist_patches",), **more):
    shared = {"id": "c", "source": "s", "place": "Table 1", "sentence": "It is so.", "status": Status.recalled}
    return Claim(**shared, kind=kind, bound=bound, experiments=list(experiments), **more)


def told(found):
    return [(finding.says, finding.pairs) for finding in found]


def plus(*differences):
    return [value + difference for value, difference in zip(SOFTMAX, differences, strict=False)]


@pytest.mark.parametrize(
    ("differences", "says"),
    [
        ((0.01, 0.02, 0.03, 0.02, 0.02), Says.HOLDS),
        ((-0.01, -0.02, -0.03, -0.02, -0.02), Says.FAILS),
        ((0.01, -0.02, 0.03, -0.02, 0.02), Says.OPEN),
        ((0.01, 0.02, 0.03, 0.02), Says.OPEN),
    ],
)
def test_higher(make_runs, results, differences, says):
    make_runs({"softmax": SOFTMAX, 3: plus(*differences)})
    (finding,) = findings([claim(Kind.higher)], [results()])
    assert (finding.says, finding.pairs, finding.where) == (says, len(differences), "Sinkhorn, 3 half-steps")
    assert finding.effect == f"{100 * np.mean(differences):+.2f} percentage points"
    low, high = stats.t.interval(0.95, len(differences) - 1, np.mean(differences), stats.sem(differences))
    assert finding.interval == f"[{100 * low:+.2f}, {100 * high:+.2f}]"
    assert ("too few seeds" in finding.reason) == (len(differences) < 5)


@pytest.mark.parametrize(
    ("differences", "says"),
    [
        ((0.001, -0.001, 0.002, 0.0, -0.001), Says.HOLDS),
        ((0.02, 0.021, 0.022, 0.02, 0.021), Says.FAILS),
        ((0.01, 0.011, 0.0, 0.02, 0.005), Says.OPEN),  # no difference shown, but equality is not either
    ],
)
def test_equal_needs_an_interval_within_the_bound_where_the_claim_is_made(make_runs, results, differences, says):
    make_runs({"softmax": SOFTMAX, 5: plus(0.1, 0.2, 0.1, 0.2, 0.1)}, patch_size=7)
    make_runs({"softmax": SOFTMAX, 5: plus(*differences)}, patch_size=28)
    found = findings([claim(Kind.equal, 1.0, at={"model.patch_size": 28})], [results()])
    assert told(found) == [(says, 5)]
    assert "patch size 28" in found[0].where


@pytest.mark.parametrize(
    ("small", "large", "says"),
    [
        ((0.05, 0.06, 0.05, 0.06, 0.05), (0.01, 0.0, 0.01, 0.01, 0.0), Says.HOLDS),
        ((0.01, 0.0, 0.01, 0.01, 0.0), (0.05, 0.06, 0.05, 0.06, 0.05), Says.FAILS),
        ((0.05, 0.0, 0.05, 0.0, 0.05), (0.0, 0.05, 0.0, 0.05, 0.0), Says.OPEN),
    ],
)
def test_the_lead_grows(make_runs, results, small, large, says):
    make_runs({"softmax": SOFTMAX, 5: plus(*small)}, patch_size=7)
    make_runs({"softmax": SOFTMAX, 5: plus(0.5, 0.5, 0.5, 0.5, 0.5)}, patch_size=14)
    make_runs({"softmax": SOFTMAX, 5: plus(*large)}, patch_size=28)
    (finding,) = findings([claim(Kind.gap_grows)], [results()])
    assert (finding.says, finding.pairs) == (says, 5)
    assert finding.effect == f"lead {100 * (np.mean(small) - np.mean(large)):+.2f} percentage points"


def test_no_growth_without_an_axis(make_runs, results):
    make_runs({"softmax": SOFTMAX, 5: SOFTMAX})
    assert told(findings([claim(Kind.gap_grows)], [results()])) == [(Says.NOT_RUN, 0)]


@pytest.mark.parametrize(("last", "says"), [(0.2, Says.HOLDS), (0.9, Says.FAILS), (None, Says.OPEN)])
def test_flatter(make_run, results, last, says):
    for seed in range(5):
        folder = make_run("softmax", seed)
        end = [0.5 - 0.1 * (-1) ** seed, 0.5 + 0.1 * (-1) ** seed][seed % 2] + 0.1 * seed if last is None else last
        values = {1: 0.6 + 0.01 * seed if last is not None else 0.7, 45: end}
        lines = [
            {"epoch": epoch, "layer": "blocks.0", "column_sums": [1 - width, 1 + width]}
            for epoch, width in values.items()
        ]
        (folder / "column_sums.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    make_run("sinkhorn", 0)
    (finding,) = findings([claim(Kind.flatter)], [results()])
    assert (finding.says, finding.pairs) == (says, 5)
    if last is not None:
        assert finding.effect == f"unevenness 0.620 at epoch 1, {last:.3f} at 45"


def test_cheap_is_open_where_the_interval_holds_the_bound(make_runs, results):
    for index, folder in enumerate(make_runs({"softmax": SOFTMAX, 3: SOFTMAX})):
        seconds = 10.0 * (1.1 + 0.2 * (-1) ** index if index >= 5 else 1.0)
        (folder / "timing.jsonl").write_text(json.dumps({"epoch": 1, "seconds": seconds}) + "\n")
    (finding,) = findings([claim(Kind.cheap, 1.1)], [results()])
    assert (finding.says, finding.pairs) == (Says.OPEN, 5)


@pytest.mark.parametrize(("factor", "says"), [(1.05, Says.HOLDS), (1.5, Says.FAILS)])
def test_cheap(make_runs, results, factor, says):
    folders = make_runs({"softmax": SOFTMAX, 3: SOFTMAX})
    for index, folder in enumerate(folders):
        seconds = (factor if index >= 5 else 1.0) * (10 + index % 5) * (1 + 0.001 * (index % 3))
        rows = [{"epoch": 1, "seconds": 99.0}, {"epoch": 1, "seconds": seconds}, {"epoch": 2, "seconds": seconds}]
        (folder / "timing.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (finding,) = findings([claim(Kind.cheap, 1.1)], [results()])
    assert (finding.says, finding.pairs) == (says, 5)
    assert math.isclose(float(finding.effect.split()[0]), factor, rel_tol=0.01)
    low, high = map(float, finding.interval.strip("[]").split(","))
    assert low <= factor * 1.001
    assert high >= factor * 0.999


def test_other_data_and_stand_ins_are_called_so(make_runs, results):
    make_runs({"softmax": SOFTMAX, 5: SOFTMAX})
    (other,) = findings([claim(Kind.higher, data=["mnist"])], [results()])
    (same,) = findings([claim(Kind.higher, data=["mnist5k"])], [results()])
    (stand_in,) = findings([claim(Kind.higher, experiments=["x"], stand_ins=["mnist_patches"])], [results()])
    assert [finding.stand_in for finding in (other, same, stand_in)] == [True, False, True]
    assert "(a stand-in)" in claim_table([stand_in]).rows[0][2]
    assert "(a stand-in)" in stand_in.words()


def test_every_claim_of_the_paper_is_listed(make_runs, results):
    make_runs({"softmax": SOFTMAX, 5: plus(0.01, 0.02, 0.03, 0.02, 0.02)})
    claims = load_paper().claims
    table = claim_table(findings(claims, [results()]))
    assert {row[0] for row in table.rows} == {entry.sentence for entry in claims}
    assert "not run here" in {row[1] for row in table.rows}
    assert len(claims) >= 11
