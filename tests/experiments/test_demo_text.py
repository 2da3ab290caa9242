import json
from pathlib import Path

import pytest

from experiments import demo
from experiments.config import origin
from experiments.data import sentences_baseline
from experiments.errors import RunError
from experiments.runners.run_dir import RunDir


def test_sentiment_is_softmax_against_three_half_steps(runs):
    jobs = demo.jobs([f"paths.runs={runs.folder}"], "movie_sentences")
    assert len(jobs) == len({job.folder.path for job in jobs}) == 8
    configs = [job.folder.config for job in jobs]
    assert {
        (config["attention"]["name"], config["attention"].get("n_iters"), config["seed"]) for config in configs
    } == {(*attention, seed) for attention in (("softmax", None), ("sinkhorn", 3)) for seed in range(4)}
    for config in configs:
        del config["attention"], config["seed"], config["label"], config["optimizer"]["lr"]
        assert config == configs[0]


def test_translation_trains_the_shared_weights_first(runs):
    jobs = demo.jobs([f"paths.runs={runs.folder}"], "ha_de_en")
    first, adapted = jobs[:2], jobs[2:]
    shared = {job.folder.config["seed"]: job.folder.path for job in first}
    assert sorted(shared) == [0, 1]
    assert len(adapted) == 4
    for job in adapted:
        before, _ = origin(job.folder.config)
        assert RunDir.of(before).path == shared[job.folder.config["seed"]]
    assert {job.folder.config["attention"].get("n_iters") for job in adapted} == {None, 3}


def test_parts_of_text_run_only_where_they_are_named(monkeypatch, runs, tmp_path):
    started, prepared = [], []
    monkeypatch.setattr(demo, "train_all", lambda waiting, *_: started.extend(waiting) or ["not now"])
    monkeypatch.setattr(demo, "prepare_text", lambda folder, part, console: prepared.append((folder, part)))
    assert demo.main([f"paths.runs={runs.folder}"]) == 1
    assert not prepared
    started.clear()
    assert demo.main(["movie_sentences", f"paths.runs={runs.folder}", f"paths.data={tmp_path}"]) == 1
    assert {job.folder.config["experiment"] for job in started} == {"movie_sentences_sentiment"}
    assert prepared == [(tmp_path, "movie_sentences")]


def test_bleu_is_told_before_and_after(runs):
    jobs = demo.jobs([f"paths.runs={runs.folder}"], "ha_de_en")
    sinkhorn = next(job for job in jobs if job.folder.config["attention"]["name"] == "sinkhorn")
    sinkhorn.folder.path.mkdir(parents=True)
    place = {"epoch": 3, "checkpoint": "checkpoints/checkpoint_last.pt", "test": {"bleu": 12.25}}
    places = {"initial": {"test": {"bleu": 11.5}}, "best": place, "last": place}
    facts = {"seed": 0, "epochs": 3, "data": {}, "metric": "loss", "selected_on": "val"}
    (sinkhorn.folder.path / "result.json").write_text(json.dumps({**facts, **places}))
    (line,) = demo.before_and_after(jobs)
    assert line.endswith("3 half-steps, seed 0: test BLEU 11.50 before adaptation, 12.25 after 3 epochs of it")


def write(folder: Path, split: str, sentences: list[tuple[str, str]]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for number, column in enumerate(("text", "label")):
        (folder / f"{split}.{column}").write_text("".join(f"{row[number]}\n" for row in sentences))


def test_the_baseline_reads_words_and_tests_on_the_test_split(tmp_path):
    folder = tmp_path / "movie_sentences" / "split"
    good, bad = ("a good film", "positive"), ("a bad film", "negative")
    write(folder, "train", [good, bad] * 10)
    write(folder, "valid", [good, bad] * 5)
    write(folder, "test", [good, bad, ("bad, bad", "negative"), ("good", "negative")])
    found = sentences_baseline.measure(tmp_path)
    assert (found.val, found.test) == (1.0, 0.75)
    assert "test accuracy 0.7500" in str(found)
    with pytest.raises(RunError, match=r"prepare movie_sentences"):
        sentences_baseline.measure(tmp_path / "elsewhere")
