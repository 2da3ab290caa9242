"""The arguments of fairseq-train that a configuration stands for.

Sections `data`, `model`, `optimizer` and `scheduler` hold a few keys of the suite (`KEYS`); every further key in them
is an option of fairseq, task, criterion, architecture, optimizer or scheduler, by its own name with underscores:
`max_source_positions: 256` is `--max-source-positions 256`. True is the bare option, false and null leave it out, a
list is joined by commas, a mapping is written as JSON.
"""

import hashlib
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.fabric.plugins.environments import SLURMEnvironment

from ..errors import RunError
from ..seeding import stream_seed
from .products import MATMUL_PRECISIONS

Config = Mapping[str, Any]

ROOT = Path(__file__).resolve().parents[2]
PLUGIN = ROOT / "plugins" / "fairseq_sinkhorn"
#: The keys of each section that are not passed on by their own name.
KEYS: dict[str, tuple[str, ...]] = {
    "data": (
        "name",
        "folder",
        "batch_size",
        "max_tokens",
        "eval_batch_size",
        "eval_max_tokens",
        "generation",
        "validate_bleu",
    ),
    "model": (),
    "optimizer": ("name", "lr"),
    "scheduler": ("name", "milestones", "gamma"),
}
RESPLIT_SHARE = 0.8
NEEDED = {"data": ("name", "folder", "task"), "model": ("arch", "criterion"), "optimizer": ("name", "lr")}


def arguments(
    config: Config, checkpoints: Path, initial: Path | None = None, environment: Mapping[str, str] | None = None
) -> list[str]:
    """The words after `fairseq-train`, for one process of the run.

    Args:
        config: resolved.
        checkpoints: folder of the checkpoints.
        initial: checkpoint of another run, whose weights are the first ones.
        environment: variables that a job's tasks are told apart by; None for this process's own.

    Raises:
        RunError: for what fairseq cannot do, options that the suite sets itself, and what is not there.
    """
    trainer = config["trainer"]
    processes = trainer["devices"] * trainer["num_nodes"]
    made = {
        "user-dir": str(PLUGIN),
        "save-dir": str(checkpoints.resolve()),
        "seed": str(stream_seed("fairseq", config["seed"]) % 2**31),
        "max-epoch": str(trainer["max_epochs"]),
        "update-freq": str(trainer["accumulate_grad_batches"]),
        "clip-norm": str(trainer["gradient_clip_norm"] or 0.0),
        # fairseq leaves out a last batch whose size is no multiple of 8.
        "required-batch-size-multiple": "1",
        # By default the batches of the first epoch serve for all, and are other ones in a run that goes on later.
        "update-epoch-batch-itr": "1",
        "no-epoch-checkpoints": "",
        "log-format": "json",
        "log-interval": "10",
        **_validation(config),
        **_precision(trainer),
        **_batches(config["data"], processes),
        **distributed(trainer, os.environ if environment is None else environment),
        **_attention(config["attention"]),
        **_bleu(config["data"]),
        **_scheduler(config),
        "optimizer": config["optimizer"]["name"],
        **({"finetune-from-model": str(initial.resolve())} if initial is not None else {}),
    }
    for option, (key, value) in _further(config).items():
        if option in made:
            raise RunError(f"{key}: --{option} is set by the suite itself; see its sections")
        word = _word(value)
        if word is not None:
            made[option] = word
    _agree(config)
    words = [str(data_bin(config["data"]))]
    for option, value in made.items():
        words += [f"--{option}={value}"] if value != "" else [f"--{option}"]
    return words


def settings(config: Config, initial: Path | None = None) -> dict[str, Any]:
    """What `fairseq_child` is told beside fairseq's arguments: its `Settings`."""
    trainer, recorded = config["trainer"], config["columns"]
    return {
        "columns": {**recorded, "epochs": trainer["max_epochs"]} if recorded["every"] is not None else None,
        "keep_initial": initial is not None or config["protocol"]["initial"],
        "every_n_steps": trainer["checkpoint_every_n_steps"],
        "deterministic": trainer["deterministic"],
        "matmul_precision": trainer.get("matmul_precision", "high"),
        "threads": trainer["threads"],
        "test": config["protocol"]["test"],
        "eval_max_tokens": _eval_sizes(config["data"])["max_tokens"],
        "generation": config["data"].get("generation"),
        "given": {option: key for option, (key, value) in _further(config).items() if _word(value) is not None},
    }


def score_request(config: Config, checkpoints: Mapping[int, Path], split: str) -> dict[str, Any]:
    """What `fairseq_score` is told.

    Args:
        config: resolved.
        checkpoints: files by any numbers.
        split: "train", "val" or "test".
    """
    data, trainer = config["data"], config["trainer"]
    return {
        "user_dir": str(PLUGIN),
        "data": str(data_bin(data)),
        "checkpoints": {str(number): str(path.resolve()) for number, path in checkpoints.items()},
        "split": {"val": "valid"}.get(split, split),
        **_eval_sizes(data),
        "generation": data.get("generation"),
        "threads": trainer["threads"],
        "accelerator": trainer["accelerator"],
        "deterministic": trainer["deterministic"],
        "matmul_precision": trainer.get("matmul_precision", "high"),
    }


def _eval_sizes(data: Config) -> dict[str, int | None]:
    """Sentences and tokens to a batch of an evaluation: as in training, where nothing else is said."""
    return {key: data.get(f"eval_{key}") or data.get(key) for key in ("batch_size", "max_tokens")}


def _further(config: Config) -> dict[str, tuple[str, Any]]:
    """What the sections hold beside the suite's keys: options of fairseq, with their key and value."""
    return {
        str(key).replace("_", "-"): (f"{section}.{key}", value)
        for section, keys in KEYS.items()
        for key, value in (config[section] or {}).items()
        if key not in keys
    }


def _agree(config: Config) -> None:
    """Refuses what fairseq would take and not heed.

    Raises:
        RunError: naming the key.
    """
    data, scheduler = config["data"], config["scheduler"] or {}
    if config["protocol"]["mean_over"] != "samples":
        raise RunError(
            f"protocol.mean_over={config['protocol']['mean_over']}: fairseq's metrics are means over samples alone"
        )
    if data.get("generation") and not data.get("target_lang"):
        raise RunError("data.generation is how to translate: it needs data of two languages (data.target_lang)")
    for key in data:
        if str(key).startswith("eval_bleu") or key == "eval_tokenized_bleu":
            raise RunError(f"data.{key}: whether and how BLEU is counted say data.validate_bleu and data.generation")
    if scheduler.get("gamma") is not None and scheduler.get("milestones") is None:
        raise RunError("scheduler.gamma is what the rate falls by at scheduler.milestones, and there are none")
    if scheduler.get("lr_shrink") is not None and scheduler.get("force_anneal") is None:
        raise RunError("scheduler.lr_shrink is for scheduler.force_anneal, the epoch that it begins with")


def check_sections(config: Config) -> None:
    """Refuses a configuration that was made for another engine, or lacks what fairseq needs.

    Raises:
        RunError: naming the key.
    """
    for section, keys in NEEDED.items():
        for key in keys:
            if config[section].get(key) is None and (section, key) != ("optimizer", "lr"):
                raise RunError(f"engine=fairseq needs {section}.{key}: take a {section} that is made for fairseq")
    for section in KEYS:
        if "_target_" in (config[section] or {}):
            raise RunError(
                f"{section}: {config[section]['_target_']} is for engine=lightning; take a {section} that is made for "
                "fairseq"
            )


def data_folder(data: Config) -> Path:
    """The folder that `experiments.data.prepare` made."""
    return Path(data["folder"]) / data["name"]


def data_bin(data: Config) -> Path:
    """The folder of fairseq's binary files."""
    return data_folder(data) / "data-bin"


def read_manifest(data: Config) -> dict[str, Any]:
    """What the preparation says of the data, and a hash of the dictionaries as `vocabulary`.

    These number words and labels: what is trained with some says nothing with others.

    Raises:
        RunError: where they are not there, or not complete.
    """
    folder = data_folder(data)
    remedy = f"python -m experiments.data.prepare {data['name']} --folder {data['folder']}"
    try:
        manifest: dict[str, Any] = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
        if not isinstance(manifest["sizes"], dict) or not {"name", "split_hash"} <= manifest.keys():
            raise ValueError("it is no manifest")
    except (OSError, ValueError, LookupError, TypeError):
        raise RunError(f"data: {folder} is not prepared: {remedy}") from None
    if not data_bin(data).is_dir():
        raise RunError(f"data: {folder} has no data-bin; install fairseq, then: {remedy}")
    digest = hashlib.sha256()
    for path in sorted(data_bin(data).rglob("dict*.txt")):
        digest.update(f"{path.relative_to(data_bin(data))} {path.stat().st_size}\n".encode() + path.read_bytes())
    return {**manifest, "vocabulary": digest.hexdigest()}


def facts(manifest: Config, data: Config) -> dict[str, Any]:
    """What the run card and the result say of the data."""
    sizes = {{"valid": "val"}.get(split, split): count for split, count in manifest["sizes"].items()}
    digest = manifest["split_hash"]
    if data.get("resplit_seed") is not None:  # as the plugin's sentence_prediction_resplit does it
        total = sum(sizes.values())
        sizes = {"train": int(RESPLIT_SHARE * total), "test": total - int(RESPLIT_SHARE * total)}
        digest = hashlib.sha256(f"{digest} {data['resplit_seed']}".encode()).hexdigest()
    return {"name": manifest["name"], "split_hash": digest, "vocabulary": manifest["vocabulary"], "sizes": sizes}


def other_data(before: Config, now: Config) -> str | None:
    """How the data of a run are other ones than those now, by `facts` of both; None where they are the same."""
    for key, name in (("split_hash", "splits"), ("vocabulary", "dictionaries")):
        if before.get(key, now[key]) != now[key]:  # runs of earlier versions have no vocabulary
            return f"{name} {now[key][:12]}, not {before[key][:12]}"
    return None


def _word(value: Any) -> str | None:
    """A value as a word of the command line, "" for a bare option, None to leave it out."""
    if value is None or value is False:
        return None
    if value is True:
        return ""
    if isinstance(value, dict):
        return json.dumps(value)
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)


def _validation(config: Config) -> dict[str, str]:
    protocol = config["protocol"]
    if protocol["metric"] == "bleu" and not config["data"].get("validate_bleu"):
        raise RunError("protocol.metric=bleu needs data.validate_bleu=true: nothing is translated in validation")
    if protocol["metric"] == "accuracy" and not config["model"]["criterion"].startswith("sentence_prediction"):
        raise RunError(
            "protocol.metric=accuracy is for model.criterion=sentence_prediction; "
            f"{config['model']['criterion']} has loss, and bleu where data.validate_bleu=true"
        )
    made = {"best-checkpoint-metric": protocol["metric"]}
    if protocol["metric"] != "loss":
        made["maximize-best-checkpoint-metric"] = ""
    if protocol["select_on"] == "val":
        return {**made, "valid-subset": "valid"}
    return {**made, "valid-subset": "test", "ignore-unused-valid-subsets": ""}


def _precision(trainer: Config) -> dict[str, str]:
    if trainer.get("matmul_precision", "high") not in MATMUL_PRECISIONS:
        wrong, known = trainer["matmul_precision"], ", ".join(MATMUL_PRECISIONS)
        raise RunError(f"trainer.matmul_precision={wrong}: it is one of {known}")
    if trainer.get("compile", False):
        raise RunError("trainer.compile=true: fairseq's models are not compiled; leave it false")
    if trainer["strategy"] != "auto":
        raise RunError(f"trainer.strategy={trainer['strategy']}: fairseq's runs know auto (data parallel) alone")
    if trainer["accelerator"] not in ("auto", "cpu", "gpu", "cuda"):
        raise RunError(f"trainer.accelerator={trainer['accelerator']}: fairseq trains on gpu or cpu")
    on_cpu = {"cpu": ""} if trainer["accelerator"] == "cpu" else {}
    if trainer["precision"] == "32":
        return on_cpu
    if trainer["precision"] == "fp16":
        if on_cpu:
            raise RunError("trainer.precision=fp16 needs a GPU; on a CPU take 32")
        return {"amp": ""}  # autocast, weights in float32; fairseq's --fp16 makes the weights half ones
    reason = "its --bf16 asks for a TPU" if trainer["precision"] == "bf16" else "it has no such mode"
    raise RunError(f"trainer.precision={trainer['precision']} is not for fairseq 0.12.3, {reason}: take 32 or fp16")


def _batches(data: Config, processes: int) -> dict[str, str]:
    """The sizes of a whole batch, whatever the number of processes: see `fairseq_batches`."""
    made = {}
    if data.get("batch_size") is None and data.get("max_tokens") is None:
        raise RunError("data.batch_size (sentences) or data.max_tokens says how large a batch is; both are missing")
    for key, option in (("batch_size", "batch-size"), ("max_tokens", "max-tokens")):
        size, evaluated = data.get(key), data.get(f"eval_{key}")
        if size is not None:
            made[option] = str(_count(f"data.{key}", size))
        if evaluated is not None:
            made[f"{option}-valid"] = str(_count(f"data.eval_{key}", evaluated))
    size = data.get("batch_size")
    if size is not None and size < processes:
        raise RunError(f"data.batch_size={size} cannot be divided among {processes} processes: take larger batches")
    return made


def distributed(trainer: Config, environment: Mapping[str, str]) -> dict[str, str]:
    """Fairseq's options for several processes; none for one.

    On one machine the first process starts the others (`fairseq_child`). Where srun has started a process for each
    device, every one of them is a process of the run: SLURM_PROCID and SLURM_LOCALID number them, and they meet at
    MASTER_PORT of MASTER_ADDR, or of the job's first node.

    Raises:
        RunError: where srun has started another number of processes than the run has, or nothing says where they meet.
    """
    devices, nodes = trainer["devices"], trainer["num_nodes"]
    processes = devices * nodes
    # Set by srun alone; SLURM_NTASKS stands in batch scripts and in interactive shells too.
    started = None if "SLURM_PTY_PORT" in environment else environment.get("SLURM_STEP_NUM_TASKS")
    made = {"distributed-world-size": str(processes)}
    if processes > 1:
        # Each reads the checkpoint itself: what fairseq sends from the first one, torch.load refuses (weights_only).
        made["load-checkpoint-on-all-dp-ranks"] = ""
    if started is None:
        if nodes > 1:
            raise RunError(
                f"trainer.num_nodes={nodes} needs srun to start a process for each device: sbatch --nodes={nodes} "
                f"--ntasks-per-node={devices} slurm/train.sbatch"
            )
        return made
    if int(started) != processes:
        raise RunError(
            f"srun has started {started} processes, and the run has trainer.num_nodes={nodes} × trainer.devices="
            f"{devices}: give SLURM --nodes={nodes} --ntasks-per-node={devices}"
        )
    if processes == 1:
        return made
    if "MASTER_PORT" not in environment:
        raise RunError("MASTER_PORT, where the processes of this run meet, is not set: submit it by slurm/train.sbatch")
    address = environment.get("MASTER_ADDR") or SLURMEnvironment.resolve_root_node_address(
        environment["SLURM_NODELIST"]
    )
    return made | {
        "distributed-init-method": f"tcp://{address}:{environment['MASTER_PORT']}",
        "distributed-rank": environment["SLURM_PROCID"],
        "device-id": environment["SLURM_LOCALID"],
        "distributed-no-spawn": "",
    }


def _bleu(data: Config) -> dict[str, str]:
    """BLEU in validation: as in the evaluation of the test split, by sacrebleu on detokenised text."""
    if not data.get("validate_bleu"):
        return {}
    if not data.get("generation"):
        raise RunError("data.validate_bleu=true needs data.generation, how to translate: take data of two languages")
    return {
        "eval-bleu": "",
        "eval-bleu-args": json.dumps(data["generation"]),
        "eval-bleu-detok": "moses",
        "eval-bleu-remove-bpe": "@@ ",
    }


def _attention(attention: Config) -> dict[str, str]:
    options = dict(attention)
    made = {"attention-normalizer": options.pop("name")}
    for key, option in (("n_iters", "sinkhorn-iters"), ("gradient", "sinkhorn-gradient")):
        if options.get(key) is not None:
            made[option] = str(options[key])
        options.pop(key, None)
    layers = options.pop("layers", None)
    if layers is not None:
        made["sinkhorn-layers"] = json.dumps(layers) if isinstance(layers, list) else str(layers)
    if options:
        made["attention-normalizer-options"] = json.dumps(options)
    return made


def _scheduler(config: Config) -> dict[str, str]:
    """`--lr` and `--lr-scheduler`; null keeps the rate.

    `fixed` takes `milestones` (epochs that are over when the rate falls) and `gamma`, as torch's MultiStepLR does; they
    become fairseq's list of one rate for each epoch.
    """
    rate, scheduler = _positive("optimizer.lr", config["optimizer"]["lr"]), config["scheduler"]
    if scheduler is None:
        return {"lr-scheduler": "fixed", "lr": repr(rate)}
    if "name" not in scheduler:
        raise RunError("scheduler.name is missing: fairseq's schedulers are fixed, inverse_sqrt, cosine, ...")
    rates = [rate]
    if milestones := scheduler.get("milestones"):
        if not isinstance(milestones, list) or not all(isinstance(epoch, int) for epoch in milestones):
            raise RunError(f"scheduler.milestones must be a list of epochs; got {milestones}")
        gamma = _positive("scheduler.gamma", scheduler.get("gamma"))
        if scheduler["name"] != "fixed":
            raise RunError(f"scheduler.milestones is for scheduler.name=fixed, not {scheduler['name']}")
        epochs = range(1, config["trainer"]["max_epochs"] + 1)
        fallen = [sum(milestone < epoch for milestone in milestones) for epoch in epochs]
        rates = [rate * gamma**times for times in fallen]
    return {"lr-scheduler": scheduler["name"], "lr": ",".join(map(repr, rates))}


def _positive(key: str, value: Any) -> float:
    """A number as YAML has it; `1e-3` without a point is text there."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if isinstance(value, bool) or not 0 < number < math.inf:
        raise RunError(f"{key} must be a number above 0; got {value}")
    return number


def _count(key: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise RunError(f"{key} must be a whole number above 0; got {value}")
    return value
