"""The figures' command, and the numbers of figure 1 and of the convergence figure against reference and recorder."""

import csv
import math

import pytest
import torch
from sinkhorn_attention import record_attention
from sinkhorn_attention.reference import sinkhorn_reference

from experiments.evaluate import load_run
from experiments.figures import NAMES, convergence, normalizations
from experiments.figures.__main__ import load, main


def rows(path):
    with open(path, encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def test_every_figure_is_listed_with_what_it_shows(capsys):
    assert main(["--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(NAMES)
    for name, line in zip(NAMES, lines, strict=True):
        assert line.endswith(load(name).TITLE)


def test_figure_1_has_the_maps_it_says(tmp_path, capsys):
    assert main(["normalizations", "--out", str(tmp_path), "--tokens", "6", "--n-iters", "5"]) == 0
    assert {path.suffix for path in tmp_path.iterdir()} == {".svg", ".pdf", ".png", ".csv"}
    found: dict[str, torch.Tensor] = {}
    for row in rows(tmp_path / "normalizations.csv"):
        coupling = found.setdefault(row["normalisation"], torch.zeros(6, 6, dtype=torch.float64))
        coupling[int(row["query"]), int(row["key"])] = float(row["value"])
    plain, softmax, five, converged = found.values()
    scores = plain.log()  # up to a constant, which no normalisation sees
    assert plain.sum() == pytest.approx(6)
    for coupling, n_iters in ((softmax, 1), (five, 5), (converged, 4001)):
        torch.testing.assert_close(coupling, sinkhorn_reference(scores, n_iters), rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(converged.sum(0), torch.ones(6, dtype=torch.float64), rtol=0, atol=1e-9)
    assert (softmax.sum(0) - 1).abs().max() > (five.sum(0) - 1).abs().max() > 1e-4
    assert "Sinkhorn, 5 half-steps: row sums 1 to 1" in capsys.readouterr().out


def test_the_same_figure_is_the_same_bytes(tmp_path):
    for folder in ("a", "b"):
        assert main(["normalizations", "--out", str(tmp_path / folder), "--tokens", "4"]) == 0
    for path in (tmp_path / "a").iterdir():
        assert path.read_bytes() == (tmp_path / "b" / path.name).read_bytes(), path.name


def test_column_errors_are_those_of_the_reference_masks_included():
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(3, 5, 8, generator=generator, dtype=torch.float64)
    query_mask, key_mask = torch.arange(5) < 4, torch.arange(8) < 6
    errors = convergence.column_errors([(scores, query_mask, key_mask)])
    for at, steps in enumerate(convergence.HALF_STEPS[:4]):
        coupling = sinkhorn_reference(scores[:, :4, :6], steps)
        expected = (coupling.sum(-2) - 4 / 6).abs().amax(-1) / (4 / 6)
        torch.testing.assert_close(errors[at], expected)
    assert errors.shape == (len(convergence.HALF_STEPS), 3)


def test_the_scores_of_a_trained_run_are_those_its_maps_are_made_of(finished):
    folder = finished("attention=sinkhorn", "attention.n_iters=3")
    ((name, calls),) = convergence.trained_scores(folder, None).items()
    assert name.startswith("trained, sinkhorn, blocks.0.attn")
    run = load_run(folder)
    images, _ = next(iter(run.data.eval_loader("train")))
    with torch.no_grad(), record_attention(run.model) as log:
        run.model(images[:4])
    (record,) = log["blocks.0.attn"]
    errors = convergence.column_errors(calls)
    assert errors.shape == (len(convergence.HALF_STEPS), 4)
    torch.testing.assert_close(errors[1].float(), record.column_error.flatten(), rtol=1e-4, atol=1e-5)
    assert (errors[0] > errors[1]).all()


def test_convergence_with_and_without_a_run(finished, tmp_path, capsys):
    runs = finished("attention=sinkhorn", "attention.n_iters=3").parent.parent
    small = ["--out", str(tmp_path), "--tokens", "4", "--spreads", "1"]
    assert main(["convergence", *small, "--runs", str(runs)]) == 0
    table = rows(tmp_path / "convergence.csv")
    families = {row["scores"] for row in table}
    assert len(families) == 2
    assert any(name.startswith("trained, ") for name in families)
    random = [row for row in table if row["scores"] == "random, std 1"]
    assert [int(row["n_iters"]) for row in random] == list(convergence.HALF_STEPS)
    assert float(random[0]["median"]) > 1e-2 > 1e-10 > float(random[-1]["median"])
    assert all(float(row["least"]) <= float(row["median"]) <= float(row["largest"]) for row in table)
    capsys.readouterr()
    assert main(["convergence", *small, "--runs", str(tmp_path / "nowhere")]) == 0
    assert f"No finished run under {tmp_path / 'nowhere'}: trained scores are not shown" in capsys.readouterr().out
    assert {row["scores"] for row in rows(tmp_path / "convergence.csv")} == {"random, std 1"}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["normalizations", "--tokens", "1"], "--tokens must be at least 2"),
        (["normalizations", "--spread", "nan"], "--spread positive"),
        (["convergence", "--spreads", "-1"], "--spreads positive"),
        (["convergence", "--run", "nothing/here"], "is not a run's folder"),
    ],
)
def test_bad_options_get_a_sentence(words, message, tmp_path, capsys):
    assert main([*words, "--out", str(tmp_path)]) == 1
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_made(tmp_path, capsys):
    (tmp_path / "file").write_text("", encoding="utf-8")
    assert main(["normalizations", "--tokens", "3", "--out", str(tmp_path / "file")]) == 1
    assert "cannot be written to" in capsys.readouterr().err


def test_no_figure_of_that_name(capsys):
    for words in ([], ["figure7"]):
        with pytest.raises(SystemExit):
            main(words)
    assert "invalid choice: 'figure7'" in capsys.readouterr().err


def test_maps_have_the_mass_of_their_tokens():
    scores = torch.randn(5, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for coupling in normalizations.maps(scores, 3).values():
        assert math.isclose(float(coupling.sum()), 5.0, rel_tol=1e-12)
