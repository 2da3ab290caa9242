"""A finished run again: `python -m experiments.evaluate RUN [--split test]`, or `load_run(RUN)` in Python."""

import argparse
import io
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .command import finish
from .data.base import DataModule, other_data
from .errors import RunError
from .files import explain_full_disk, write_atomic
from .runners import lightning
from .runners.checkpoints import read_checkpoint
from .runners.classifier import Classifier
from .runners.run_dir import RunDir, read_config, read_record

# Another machine, device or number of threads rounds differently; a thousandth is beyond rounding.
TOLERANCE = 1e-3
# What the config.yaml of every run has had from the first on.
SECTIONS = ("experiment", "seed", "data", "model", "attention", "optimizer", "trainer", "protocol", "paths")
Numbers = dict[str, float]


class Predictions(NamedTuple):
    """Logits (n, C), their most likely classes (n,) and the true ones (n,), in the split's own order."""

    logits: Tensor
    predicted: Tensor
    labels: Tensor


@dataclass(frozen=True)
class LoadedRun:
    """A finished run with its weights.

    Attributes:
        folder: where it lies.
        config: its resolved configuration.
        result: what result.json holds.
        at: "best" (epoch chosen by the protocol) or "last".
        module: the trained LightningModule.
        data: its data, with the splits that it was trained with.
    """

    folder: Path
    config: dict[str, Any]
    result: dict[str, Any]
    at: str
    module: Classifier
    data: DataModule

    @property
    def model(self) -> nn.Module:
        """The model itself, from inputs to logits, in evaluation mode."""
        return self.module.model.eval()

    def metrics(self, split: str = "test") -> dict[str, float]:
        """Loss and accuracy on a split, computed anew."""
        return lightning.evaluate(self.config, self.module, self.data, split, self.result[self.at]["epoch"])

    def recorded(self, split: str = "test") -> dict[str, float] | None:
        """The same as result.json has them, None where the run did not evaluate that split."""
        return self.result[self.at].get(split)

    def predictions(self, split: str = "test") -> Predictions:
        """What the model says of every sample of a split."""
        trainer = lightning.evaluator(self.config)
        self.data.evaluation_epoch = self.result[self.at]["epoch"] - 1
        batches = trainer.predict(self.module, self.data.eval_loader(split))
        assert batches is not None
        logits = torch.cat([batch[0].cpu() for batch in batches])
        labels = torch.cat([batch[1].cpu() for batch in batches])
        return Predictions(logits, logits.argmax(-1), labels)


def load_run(path: str | Path, at: str = "best", data: str | Path | None = None) -> LoadedRun:
    """Loads a finished run.

    Args:
        path: its folder, wherever it has been moved to.
        at: "best" or "last".
        data: the folder of all data, where it is not the one that the run was trained with.

    Raises:
        RunError: where there is no finished run, its data are gone, or they are not those that it was trained with.
    """
    folder = Path(path)
    if at not in ("best", "last"):
        raise RunError(f"at must be best or last; got {at}")
    config, result = _finished(folder, data)
    if config["engine"] == "fairseq":
        raise RunError(
            f"{folder} was trained by fairseq: `python -m experiments.evaluate` evaluates it, and "
            "fairseq.checkpoint_utils.load_model_ensemble loads its checkpoints"
        )
    lightning.quieten()
    # The rate of a run that began with another's weights followed from that one; nothing is trained here.
    loaded, module = lightning.build(config, rate=0.0)
    difference = other_data(result["data"], loaded.facts())
    if difference is not None:
        raise RunError(f"the data are not those that {folder} was trained with: {difference}")
    module.load_state_dict(read_checkpoint(folder / result[at]["checkpoint"])["state_dict"])
    return LoadedRun(folder, config, result, at, module.eval(), loaded)


def _finished(folder: Path, data: Path | str | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """Configuration, with the data where they are now, and result of a run."""
    if not (folder / "config.yaml").is_file():
        raise RunError(f"{folder} is not a run's folder: it has no config.yaml")
    config = read_config(folder)
    if missing := [name for name in SECTIONS if name not in config]:
        raise RunError(f"{folder / 'config.yaml'} has no {missing[0]}: remove it and give the run's command again")
    config.setdefault("engine", "lightning")
    run = RunDir(folder, config, "")
    if not run.finished:
        raise RunError(f"the run in {folder} is not finished: give its training command again ({_command(folder)})")
    if data is not None:
        config["data"]["folder"] = str(data)
    return config, run.result()


def _by_fairseq(folder: Path, split: str, at: str, data: str | None) -> tuple[Numbers, int, Numbers | None]:
    """Metrics of a run that fairseq trained, computed anew; the epoch; and what result.json has."""
    from .runners import fairseq, fairseq_command

    config, result = _finished(folder, data)
    facts = fairseq_command.facts(fairseq_command.read_manifest(config["data"]), config["data"])
    other = fairseq_command.other_data(result["data"], facts)
    if other is not None:
        raise RunError(f"the data are not those that {folder} was trained with: {other}")
    place = result[at]
    scores = fairseq.score(config, {place["epoch"]: folder / place["checkpoint"]}, split)
    metrics: Numbers = scores["metrics"][str(place["epoch"])]["metrics"]
    return metrics, place["epoch"], place.get(split)


def _tolerance(metric: str) -> float:
    # BLEU counts to 100, and fairseq rounds that of the validation to a hundredth.
    return 10 * TOLERANCE if "bleu" in metric else TOLERANCE


def _command(folder: Path) -> str:
    with suppress(RunError):  # no card, or a damaged one
        return str(read_record(folder / "run.json").get("command", "unknown"))
    return "unknown"


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; its exit code is 1 where the numbers are not those of result.json."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments.evaluate",
        description="Evaluates a finished run again and compares with result.json.",
    )
    parser.add_argument("run", help="the run's folder")
    parser.add_argument("--split", default="test", choices=["train", "val", "test"])
    parser.add_argument("--at", default="best", choices=["best", "last"], help="the chosen epoch, or the last")
    parser.add_argument("--data", help="folder of all data, where it has moved")
    parser.add_argument("--predictions", type=Path, help="also write logits and labels there, for torch.load")
    options = parser.parse_args(arguments)
    try:
        if _finished(Path(options.run), options.data)[0]["engine"] == "fairseq":
            if options.predictions is not None:
                raise RunError("--predictions is for engine=lightning; fairseq-generate writes translations")
            metrics, epoch, recorded = _by_fairseq(Path(options.run), options.split, options.at, options.data)
        else:
            run = load_run(options.run, options.at, options.data)
            metrics, recorded = run.metrics(options.split), run.recorded(options.split)
            epoch = run.result[options.at]["epoch"]
            if options.predictions is not None:
                with explain_full_disk(f"{options.predictions} was not written"):
                    buffer = io.BytesIO()  # torch reports a full disk, and a folder that is not there, as RuntimeError
                    torch.save(run.predictions(options.split)._asdict(), buffer)
                    write_atomic(options.predictions, buffer.getbuffer())
    except (RunError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    words = ", ".join(f"{name} {value:.6g}" for name, value in metrics.items())
    print(f"{options.split} at the {options.at} epoch ({epoch}): {words}")
    if recorded is None:
        print("result.json has no numbers of that split")
        return 0
    differing = [name for name, value in recorded.items() if not abs(value - metrics[name]) <= _tolerance(name)]
    exact = all(value == metrics[name] for name, value in recorded.items())
    if differing:
        print(f"result.json differs: {', '.join(f'{name} {recorded[name]:.6g}' for name in differing)}")
        return 1
    print("equal to result.json" if exact else "equal to result.json up to rounding")
    return 0


if __name__ == "__main__":
    finish(main)
