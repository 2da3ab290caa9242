"""The published numbers: what the file holds, and what it must not."""

import pytest

from experiments.report.published import PAPER_RESULTS, Status, load_published, published_for

GOOD = """
sources: {paper: A paper}
results:
  - id: one
    source: paper
    place: Table 1
    experiments: [mnist_patches]
    metric: accuracy
    unit: percent
    protocol: as usual
    status: recalled
    rows:
      - {model: A, attention: softmax, values: {best: 90.0, worst: 80.0}}
"""


def test_table_1_and_2_are_there_and_labelled_as_not_checked():
    results = {result.id: result for result in load_published()}
    table = results["modelnet40_set_accuracy"]
    assert [row.values for row in table.rows] == [
        {"best": 87.8, "median": 86.3, "mean": 85.8, "worst": 84.7},
        {"best": 89.1, "median": 88.4, "mean": 88.3, "worst": 88.1},
    ]
    assert table.rows[1].n_iters == 21
    assert table.runs == 4
    assert table.status.value == "published value, not yet checked against the PDF"
    assert [row.values["median"] for row in results["iwslt14_bleu_epoch_35"].rows] == [34.68, 34.73]
    assert [row.values["median"] for row in results["cats_dogs_accuracy"].rows] == [79.0, 79.5]
    for result in results.values():
        assert result.status is not Status.checked
        assert "not yet checked against the PDF" in result.status.value


def test_an_experiment_and_its_official_form_share_their_counterparts():
    results = load_published()
    found = published_for("mnist_patches", results)
    assert [result.id for result in found] == ["mnist_patches_accuracy"]
    assert found[0].rows[0].values == {"axis_low": 91.0, "axis_high": 97.5}
    assert published_for("mnist_patches_official", results) == found
    assert published_for("modelnet40_set_paper", results) == published_for("modelnet40_set", results)
    assert published_for("mnist", results) == []


def test_sources_are_spelt_out():
    for result in load_published(PAPER_RESULTS):
        assert "arXiv" in result.source or result.status is Status.web


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("status: recalled", "status: guessed", "status"),
        ("status: recalled", "", "status is missing"),
        ("source: paper", "source: other", "source 'other' is not one of paper"),
        ("unit: percent", "unit: parts", "unit 'parts' is not one of percent"),
        ("best: 90.0", "best: 900.0", "best is 900.0"),
        ("best: 90.0", "best: .nan", "best is nan"),
        ("best: 90.0", "best: high", "best"),
        ("best: 90.0", "best: 70.0", "worst is above best"),
        ("best: 90.0", "beste: 90.0", "'beste' is not one of best"),
        ("place: Table 1", "place: Table 1\n    page: 3", "page"),
        ("place: Table 1", "place: Table 1\n    place: Table 2", "duplicate key place"),
        ("protocol: as usual", "protocol: [", "while parsing"),
        ("{best: 90.0, worst: 80.0}", "{}", "row 'A' has no values"),
    ],
)
def test_what_is_wrong_is_named_with_its_file(tmp_path, old, new, message):
    assert old in GOOD
    path = tmp_path / "paper.yaml"
    path.write_text(GOOD.replace(old, new), encoding="utf-8")
    with pytest.raises(ValueError, match=message) as caught:
        load_published(path)
    assert str(path) in str(caught.value)


def test_the_same_id_twice(tmp_path):
    path = tmp_path / "paper.yaml"
    path.write_text(GOOD + GOOD.split("results:\n")[1], encoding="utf-8")
    with pytest.raises(ValueError, match="'one' is there twice"):
        load_published(path)
    path.write_text(GOOD, encoding="utf-8")
    assert load_published(path)[0].source == "A paper"
