import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from experiments import evaluate


@pytest.mark.slow
def test_weights_are_taken_over_and_evaluated_before_and_after(
    text_runs: Any, narrow: tuple[str, ...], rows: Callable[[Path], list[dict]], capsys: pytest.CaptureFixture[str]
) -> None:
    """With one half-step the Sinkformer is the softmax model: epoch 0 has the numbers that the other run ended with."""
    same = ("data.name=translation", "data.max_tokens=60", "data.generation.beam=2", "logger=none", *narrow)
    settings = [*same, "optimizer.lr=0.03", "scheduler.warmup_updates=20", "trainer.max_epochs=8"]
    quoted = ",".join(f"'{word}'" for word in ["experiment=ha_de_en_scratch", "attention=softmax", *settings])
    overrides = (
        "experiment=ha_de_en_finetune",
        *same,
        "trainer.max_epochs=1",
        "data.validate_bleu=true",
        f"init_from.overrides=[{quoted}]",
    )
    folder = text_runs.start(*overrides, "attention=sinkhorn", "attention.n_iters=1").folder

    (before,) = (text_runs.folder / "ha_de_en_scratch").glob("*-*")
    first, result = (json.loads((path / "result.json").read_text()) for path in (before, folder))
    found = rows(folder)
    assert [(row["epoch"], row["split"]) for row in found] == [
        (0, "val"), (1, "train"), (1, "val"), (0, "test"), (1, "test")
    ]  # fmt: skip
    initial = result["initial"]
    assert initial["step"] == 0
    for name, value in first["last"]["val"].items():
        assert initial["val"][name] == pytest.approx(value, abs=1e-5)
    for name in ("loss", "nll_loss", "bleu", "tokenized_bleu"):
        assert initial["test"][name] == pytest.approx(first["last"]["test"][name], abs=1e-4)
    assert initial["test"]["bleu"] > 0
    assert initial["val"]["bleu"] > 0
    assert result["last"]["test"]["loss"] != pytest.approx(initial["test"]["loss"], abs=1e-6)
    assert result["bleu_signature"].startswith("nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp|version:")
    rates = {path: [row["lr"] for row in rows(path) if "lr" in row] for path in (before, folder)}
    assert rates[folder] == [pytest.approx(rates[before][-1] / 10)]

    capsys.readouterr()
    assert evaluate.main([str(folder), "--split", "val"]) == 0
    assert "equal to result.json" in capsys.readouterr().out


def test_the_published_protocol_mixes_the_halves_and_tests_on_what_it_chooses(
    text_runs: Any, rows: Callable[[Path], list[dict]]
) -> None:
    small = [f"+model.encoder_{name}" for name in ("embed_dim=16", "ffn_embed_dim=16", "layers=1", "attention_heads=2")]
    folder = text_runs.start(
        "experiment=imdb_sentiment_official",
        "data.name=sentiment",
        "data.num_workers=0",
        "data.batch_size=8",
        "data.max_positions=16",
        *small,
        "trainer.max_epochs=1",
        "trainer.accelerator=cpu",
        "trainer.threads=1",
        "logger=none",
    ).folder
    result = json.loads((folder / "result.json").read_text())
    assert result["data"]["sizes"] == {"train": 80, "test": 20}
    assert result["steps"] == 10
    assert [row["split"] for row in rows(folder)] == ["train", "test"]
    test = result["best"]["test"]
    assert test["accuracy"] * 20 == pytest.approx(round(test["accuracy"] * 20), abs=1e-4)
    assert 0.3132 < test["loss"] < 1.3133  # the bounds of a loss of two probabilities that is softmaxed again
    assert "val" not in result["best"]
