"""The programs of fairseq over the plugin, on a made-up language: mostly in this process, a few in one of their own."""

import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

WIDTHS = [
    f"--{side}-{name}={size}"
    for side in ("encoder", "decoder")
    for name, size in (("embed-dim", 16), ("ffn-embed-dim", 16), ("layers", 2), ("attention-heads", 2))
]
Train = Callable[..., dict[str, Any]]
# By default fairseq leaves out the last batch, in generation too, when its size is not a multiple of 8.
WHOLE = "--required-batch-size-multiple=1"
# By default the batches of the first epoch are kept for all, and made anew, differently, by a run that goes on later.
RESUMABLE = "--update-epoch-batch-itr=1"

pytestmark = pytest.mark.filterwarnings("ignore")  # fairseq is written for older Hydra and torch


def lines(seed: int, count: int) -> list[str]:
    rng = random.Random(seed)
    return [" ".join(rng.choices("abcdefgh", k=rng.randint(1, 9))) for _ in range(count)]


def preprocess(arguments: list[str]) -> None:
    from fairseq import options
    from fairseq_cli import preprocess as program

    program.main(options.get_preprocessing_parser().parse_args([*arguments, "--workers=1"]))


@pytest.fixture(scope="module")
def data(plugin: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("translation")
    for seed, (split, count) in enumerate((("train", 48), ("test", 9))):
        sources = lines(seed, count)
        (folder / f"{split}.de").write_text("\n".join(sources) + "\n")
        (folder / f"{split}.en").write_text("\n".join(line.upper() for line in sources) + "\n")
    preprocess(
        [
            "--source-lang=de",
            "--target-lang=en",
            f"--trainpref={folder}/train",
            f"--testpref={folder}/test",
            f"--destdir={folder}/bin",
        ]
    )
    return folder / "bin"


def train_arguments(plugin: ModuleType, data: Path, save_dir: Path, *extra: str) -> list[str]:
    return [
        str(data),
        f"--user-dir={Path(plugin.__file__ or '').parent}",
        f"--save-dir={save_dir}",
        "--cpu",
        "--optimizer=adam",
        "--lr=0.01",
        "--batch-size=8",
        WHOLE,
        RESUMABLE,
        "--num-workers=0",
        "--no-epoch-checkpoints",
        "--disable-validation",
        "--log-format=none",
        *extra,
    ]


@pytest.fixture(scope="module")
def train(plugin: ModuleType, data: Path) -> Train:
    """Trains in this process and gives the last checkpoint."""
    from fairseq import options
    from fairseq.dataclass.utils import convert_namespace_to_omegaconf
    from fairseq_cli import train as program

    def run(save_dir: Path, *extra: str, data: Path = data) -> dict[str, Any]:
        arguments = train_arguments(plugin, data, save_dir, *extra)
        args = options.parse_args_and_arch(options.get_training_parser(), arguments)
        program.main(convert_namespace_to_omegaconf(args))
        return torch.load(save_dir / "checkpoint_last.pt", weights_only=True)

    return run


@pytest.fixture(scope="module")
def trained(train: Train, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a Sinkformer after 14 updates."""
    folder = tmp_path_factory.mktemp("trained")
    train(folder, "--arch=sinkformer_tiny", "--sinkhorn-layers=1", "--dropout=0.1", "--max-update=14", *WIDTHS)
    return folder


def hypotheses(results: Path) -> dict[str, tuple[float, str]]:
    """Number of the sentence -> score and translation."""
    found = {}
    for line in (results / "generate-test.txt").read_text().splitlines():
        if line.startswith("H-"):
            number, score, text = line.split("\t")
            found[number] = float(score), text
    return found


@pytest.fixture(scope="module")
def generate(plugin: ModuleType, data: Path) -> Callable[..., dict[str, tuple[float, str]]]:
    from fairseq import options
    from fairseq.dataclass.utils import convert_namespace_to_omegaconf
    from fairseq_cli import generate as program

    def run(folder: Path, results: Path, batch_size: int = 32) -> dict[str, tuple[float, str]]:
        arguments = generate_arguments(plugin, data, folder, results, batch_size)
        args = options.parse_args_and_arch(options.get_generation_parser(), arguments)
        program.main(convert_namespace_to_omegaconf(args))
        return hypotheses(results)

    return run


def generate_arguments(plugin: ModuleType, data: Path, folder: Path, results: Path, batch_size: int) -> list[str]:
    return [
        str(data),
        f"--user-dir={Path(plugin.__file__ or '').parent}",
        f"--path={folder / 'checkpoint_last.pt'}",
        f"--results-path={results}",
        f"--batch-size={batch_size}",
        "--beam=3",
        WHOLE,
        "--cpu",
        "--num-workers=0",
    ]


def assert_same_translations(ours: dict[str, tuple[float, str]], theirs: dict[str, tuple[float, str]]) -> None:
    assert len(ours) == 9
    assert {number: text for number, (_, text) in ours.items()} == {n: text for n, (_, text) in theirs.items()}
    for number, (score, _) in ours.items():
        assert score == pytest.approx(theirs[number][0], abs=1e-4)  # fairseq writes four digits of its own accord


def run_alone(command: list[str]) -> str:
    """Runs in a new process, without a variable that could tell torch or Python anything about the plugin."""
    environment = {name: os.environ[name] for name in ("PATH", "HOME", "TMPDIR") if name in os.environ}
    environment |= {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    result = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert result.returncode == 0, result.stderr[-3000:]
    return result.stdout


def test_translations_do_not_depend_on_the_batch(trained: Path, generate: Callable[..., Any], tmp_path: Path) -> None:
    together, alone = generate(trained, tmp_path / "32"), generate(trained, tmp_path / "1", batch_size=1)
    assert len({text for _, text in together.values()}) > 1
    assert_same_translations(alone, together)


def test_training_goes_on_in_the_middle_of_an_epoch_as_if_unbroken(train: Train, trained: Path, tmp_path: Path) -> None:
    options = ("--arch=sinkformer_tiny", "--sinkhorn-layers=1", "--dropout=0.1", *WIDTHS)
    broken = train(tmp_path, *options, "--max-update=9")  # 6 updates make an epoch
    assert broken["extra_state"]["train_iterator"]["iterations_in_epoch"] == 3
    resumed = train(tmp_path, *options, "--max-update=14")
    unbroken = torch.load(trained / "checkpoint_last.pt", weights_only=True)
    assert resumed["optimizer_history"][-1]["num_updates"] == 14
    for name, parameter in unbroken["model"].items():
        assert torch.equal(resumed["model"][name], parameter), name


def test_weights_are_taken_over_in_both_directions(train: Train, generate: Callable[..., Any], tmp_path: Path) -> None:
    """From fairseq's own model to a Sinkformer and back; with one half-step the translations are the same, too."""
    still = ("--optimizer=sgd", "--lr=0.0", "--max-update=1", *WIDTHS)
    softmax = train(tmp_path / "softmax", "--arch=transformer_tiny", "--max-update=14", *WIDTHS)
    for iters in ("1", "3"):
        source = f"--finetune-from-model={tmp_path / 'softmax' / 'checkpoint_last.pt'}"
        ours = train(tmp_path / iters, "--arch=sinkformer_tiny", f"--sinkhorn-iters={iters}", source, *still)
        assert ours["model"].keys() == softmax["model"].keys()
        assert all(torch.equal(ours["model"][name], tensor) for name, tensor in softmax["model"].items())
        assert ours["cfg"]["model"].sinkhorn_iters == int(iters)
    back = train(
        tmp_path / "back",
        "--arch=transformer_tiny",
        f"--finetune-from-model={tmp_path / '3' / 'checkpoint_last.pt'}",
        *still,
    )
    assert all(torch.equal(back["model"][name], tensor) for name, tensor in softmax["model"].items())

    stock = generate(tmp_path / "softmax", tmp_path / "results")
    assert_same_translations(generate(tmp_path / "1", tmp_path / "results1"), stock)
    assert generate(tmp_path / "3", tmp_path / "results3") != stock


def test_weights_of_another_kind_are_named(
    train: Train, trained: Path, data: Path, plugin: ModuleType, tmp_path: Path
) -> None:
    """A bare state dict, a file that is none of torch's, other content, another dictionary, another width."""
    state = torch.load(trained / "checkpoint_last.pt", weights_only=True)
    torch.save(state["model"], tmp_path / "bare.pt")
    torch.save({"weights": state["model"], "epoch": 3}, tmp_path / "other.pt")
    (tmp_path / "text.pt").write_text("encoder decoder\n")
    embedding = state["model"]["encoder.embed_tokens.weight"]
    rows = len(embedding)
    state["model"]["encoder.embed_tokens.weight"] = torch.cat([embedding, embedding])
    torch.save(state, tmp_path / "dictionary.pt")
    still = ("--arch=sinkformer_tiny", "--max-update=1")
    for name, options, said in (
        ("bare.pt", WIDTHS, "holds a bare state dict .* no checkpoint of fairseq, which has one under 'model'"),
        ("text.pt", WIDTHS, "is no checkpoint of fairseq, or is damaged: torch.load cannot read it"),
        (
            "other.pt",
            WIDTHS,
            "is no checkpoint of fairseq: it has 'weights', 'epoch', and lacks 'extra_state', 'model'",
        ),
        (
            "dictionary.pt",
            WIDTHS,
            "the weights in .*dictionary.pt are not of this model: encoder.embed_tokens.weight is "
            rf"{2 * rows}×16 there and {rows}×16 here \(another dictionary\)$",
        ),
        ("dictionary.pt", [*WIDTHS, "--encoder-ffn-embed-dim=8"], "fc1.weight is 16×16 there and 8×16 here and"),
    ):
        with pytest.raises(ValueError, match=said) as refused:
            train(tmp_path / "run", *options, *still, f"--finetune-from-model={tmp_path / name}")
        assert "\n" not in str(refused.value)


def test_half_steps_of_a_normalizer_without_any_are_refused(train: Train, trained: Path, tmp_path: Path) -> None:
    softmax = ("--arch=sinkformer_tiny", "--attention-normalizer=softmax", "--max-update=1", *WIDTHS)
    with pytest.raises(
        ValueError, match="normalizer 'softmax' has no half-steps: --sinkhorn-iters 5 would change nothing"
    ):
        train(tmp_path / "refused", *softmax, "--sinkhorn-iters=5")
    made = train(tmp_path / "softmax", *softmax)
    assert made["cfg"]["model"].sinkhorn_iters is None
    # Checkpoints of earlier versions have the number that is the default elsewhere: they are still loaded.
    made["cfg"]["model"].sinkhorn_iters = 3
    torch.save(made, tmp_path / "softmax" / "checkpoint_last.pt")
    from fairseq.checkpoint_utils import load_model_ensemble

    (model,), _ = load_model_ensemble([str(tmp_path / "softmax" / "checkpoint_last.pt")])
    assert type(model.encoder.layers[0].self_attn.normalizer).__name__ == "Softmax"


def test_a_new_process_generates(
    plugin: ModuleType, data: Path, trained: Path, generate: Callable[..., Any], tmp_path: Path
) -> None:
    arguments = generate_arguments(plugin, data, trained, tmp_path / "new", 4)
    run_alone([str(Path(sys.executable).parent / "fairseq-generate"), *arguments])
    assert_same_translations(hypotheses(tmp_path / "new"), generate(trained, tmp_path / "here"))


HUB_THEN_RESUME = """
import json, pickle, sys, torch
folder, data, user_dir, arguments = sys.argv[1], sys.argv[2], sys.argv[3], sys.argv[4:]
try:
    torch.load(folder + "/checkpoint_last.pt")
    raise SystemExit("loads without the plugin: the test shows nothing")
except pickle.UnpicklingError:
    pass
from fairseq import hub_utils
loaded = hub_utils.from_pretrained(folder, "checkpoint_last.pt", data, user_dir=user_dir)
model = loaded["models"][0].eval()
hub = hub_utils.GeneratorHubInterface(loaded["args"], loaded["task"], loaded["models"])
source = torch.tensor([[1, 1, 4, 5, 2], [4, 5, 6, 7, 2]])
encoded = model.encoder(source)["encoder_out"][0]
print(json.dumps({
    "normalized": [type(layer.self_attn).__name__ for layer in model.encoder.layers],
    "encoded": encoded[2:, 0].tolist(),
    "translation": hub.translate("a b c", beam=3),
}))
from fairseq_cli import train
sys.argv[1:] = arguments
train.cli_main()
"""


def test_a_new_process_loads_through_the_hub_and_resumes(
    plugin: ModuleType, data: Path, trained: Path, train: Train, tmp_path: Path
) -> None:
    from fairseq import checkpoint_utils

    last = tmp_path / "checkpoint_last.pt"
    last.write_bytes((trained / "checkpoint_last.pt").read_bytes())
    options = ("--arch=sinkformer_tiny", "--sinkhorn-layers=1", "--dropout=0.1", "--max-update=15", *WIDTHS)
    arguments = train_arguments(plugin, data, tmp_path, *options)
    user_dir = str(Path(plugin.__file__ or "").parent)
    out = run_alone([sys.executable, "-c", HUB_THEN_RESUME, str(tmp_path), str(data), user_dir, *arguments])
    found = json.loads(next(line for line in out.splitlines() if line.startswith("{")))
    assert found["normalized"] == ["MultiheadAttention", "SinkhornMultiheadAttention"]
    assert isinstance(found["translation"], str)
    (model,), _ = checkpoint_utils.load_model_ensemble([str(trained / "checkpoint_last.pt")])
    alone = model.eval().encoder(torch.tensor([[4, 5, 2]]))["encoder_out"][0][:, 0]
    torch.testing.assert_close(torch.tensor(found["encoded"]), alone, rtol=0, atol=1e-5)
    assert torch.load(last, weights_only=True)["optimizer_history"][-1]["num_updates"] == 15


def test_hydra_train_keeps_the_options_of_the_plugin(plugin: ModuleType, data: Path, tmp_path: Path) -> None:
    overrides = [
        f"common.user_dir={Path(plugin.__file__ or '').parent}",
        "common.cpu=true",
        "common.log_format=none",
        "task=translation",
        f"task.data={data}",
        "task.source_lang=de",
        "task.target_lang=en",
        "criterion=label_smoothed_cross_entropy",
        "optimizer=adam",
        "lr_scheduler=fixed",
        "optimization.lr=[0.01]",
        "optimization.max_update=2",
        "dataset.batch_size=8",
        "dataset.required_batch_size_multiple=1",
        "dataset.num_workers=0",
        "dataset.disable_validation=true",
        f"checkpoint.save_dir={tmp_path}",
        f"hydra.run.dir={tmp_path}/hydra",
        "+model._name=sinkformer_tiny",
        "+model.sinkhorn_iters=5",
        "+model.sinkhorn_layers=[0]",
        "+model.attention_normalizer=unbalanced_sinkhorn",
        "+model.attention_normalizer_options={rho: 2.0}",
    ]
    run_alone([str(Path(sys.executable).parent / "fairseq-hydra-train"), *overrides])

    from fairseq import checkpoint_utils

    (model,), _ = checkpoint_utils.load_model_ensemble([str(tmp_path / "checkpoint_last.pt")])
    first, second = (layer.self_attn for layer in model.encoder.layers)
    assert (first.normalizer.n_iters, first.normalizer.rho) == (5, 2.0)
    assert type(second).__name__ == "MultiheadAttention"


@pytest.fixture(scope="module")
def reviews(plugin: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sentences with one word, somewhere, that tells the label."""
    folder = tmp_path_factory.mktemp("sentiment")
    rng = random.Random(0)
    labels = [rng.choice(("neg", "pos")) for _ in range(48)]
    texts = [
        f"{left} {'good' if label == 'pos' else 'bad'} {right}"
        for left, label, right in zip(lines(3, 48), labels, lines(4, 48), strict=True)
    ]
    for name, content in (("input0", texts), ("label", labels)):
        (folder / name).write_text("\n".join(content) + "\n")
        preprocess(["--only-source", f"--trainpref={folder / name}", f"--destdir={folder / 'bin' / name}"])
    return folder / "bin"


@pytest.mark.parametrize("arch", ["sinkformer_sentiment_tiny", "sinkformer_sentiment_imdb_official"])
def test_sentence_prediction_learns(train: Train, reviews: Path, tmp_path: Path, arch: str) -> None:
    from fairseq import checkpoint_utils

    checkpoint = train(
        tmp_path,
        f"--arch={arch}",
        "--task=sentence_prediction",
        "--criterion=sentence_prediction",
        "--num-classes=2",
        "--init-token=0",
        "--max-positions=24",
        "--shorten-method=truncate",
        "--max-update=60",
        "--dropout=0.0",
        "--encoder-embed-dim=16",
        "--encoder-ffn-embed-dim=16",
        "--encoder-layers=1",
        "--encoder-attention-heads=2",
        data=reviews,
    )
    assert checkpoint["model"]["classification_heads.sentence_classification_head.weight"].shape == (2, 16)
    (model,), _, task = checkpoint_utils.load_model_ensemble_and_task([str(tmp_path / "checkpoint_last.pt")])
    task.load_dataset("train")
    samples = task.dataset("train").collater([task.dataset("train")[i] for i in range(48)])
    net_input, target = samples["net_input"], samples["target"].view(-1)
    out, _ = model.eval()(**net_input, features_only=True, classification_head_name="sentence_classification_head")
    assert (out.argmax(1) == target).float().mean() > 0.9
    total = out.sum(1)
    assert torch.allclose(total, torch.ones(48)) == (arch == "sinkformer_sentiment_imdb_official")
