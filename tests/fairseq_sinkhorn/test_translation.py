import copy
import sys
import types
from argparse import ArgumentParser, Namespace
from types import ModuleType
from typing import Any

import pytest
import torch

SENTENCES = [[4, 5, 6, 7, 8, 9, 2], [10, 4, 2], [7, 7, 5, 11, 2]]
TINY = {
    "encoder_embed_dim": 16,
    "encoder_ffn_embed_dim": 16,
    "decoder_embed_dim": 16,
    "decoder_ffn_embed_dim": 16,
    "dropout": 0.0,
}


def build(arch: str = "sinkformer_tiny", **options: Any) -> Any:
    from fairseq import models
    from fairseq.data import Dictionary

    dictionary = Dictionary()
    for symbol in "abcdefgh":
        dictionary.add_symbol(symbol)
    task = types.SimpleNamespace(source_dictionary=dictionary, target_dictionary=dictionary)
    return models.build_model(Namespace(arch=arch, **{**TINY, **options}), task)


def batch(sentences: list[list[int]], left: bool = True, extra: int = 0) -> torch.Tensor:
    length = max(map(len, sentences)) + extra
    pads = [[1] * (length - len(sentence)) for sentence in sentences]
    return torch.tensor([pad + list(s) if left else list(s) + pad for pad, s in zip(pads, sentences, strict=True)])


def loss(model: Any, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    previous = target.roll(1, 1).masked_fill(target == 1, 1)
    logits, _ = model(source, source.ne(1).sum(1), previous)
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten(), ignore_index=1)


def normalized(model: Any) -> list[int]:
    from fairseq_sinkhorn import SinkhornMultiheadAttention

    return [
        number
        for number, layer in enumerate(model.encoder.layers.children())  # iterating may drop layers
        if isinstance(layer.self_attn, SinkhornMultiheadAttention)
    ]


def test_one_half_step_is_the_stock_model_in_loss_and_gradient() -> None:
    stock, model = build("transformer_tiny"), build(sinkhorn_iters=1)
    assert list(stock.state_dict()) == list(model.state_dict())
    model.load_state_dict(stock.state_dict())
    source, target = batch(SENTENCES), batch(SENTENCES[::-1], left=False)
    losses = [loss(each, source, target) for each in (stock, model)]
    torch.testing.assert_close(losses[1], losses[0], rtol=0, atol=1e-5)
    for each in losses:
        each.backward()
    for (name, parameter), other in zip(stock.named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(other.grad, parameter.grad, rtol=1e-4, atol=1e-6, msg=name)

    three = build(sinkhorn_iters=3)
    three.load_state_dict(stock.state_dict())
    assert (loss(three, source, target) - losses[0]).abs() > 1e-4


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("n_iters", [1, 2, 3, 8])
def test_a_sentence_sees_neither_padding_nor_its_neighbours(n_iters: int, train: bool) -> None:
    model = build(sinkhorn_iters=n_iters).train(train)
    alone = {}
    for sentence in SENTENCES:
        out = model.encoder(torch.tensor([sentence]))["encoder_out"][0]
        alone[tuple(sentence)] = (
            out[:, 0],
            torch.autograd.grad(out.square().sum(), model.encoder.embed_tokens.weight)[0],
        )
    for left, extra, sentences in ((True, 0, SENTENCES), (False, 3, SENTENCES), (True, 2, SENTENCES[:0:-1])):
        source = batch(sentences, left, extra)
        out = model.encoder(source)["encoder_out"][0]
        total = torch.zeros_like(model.encoder.embed_tokens.weight)
        for column, sentence in enumerate(sentences):
            expected, gradient = alone[tuple(sentence)]
            tokens = out[source.ne(1).T[:, column], column]
            torch.testing.assert_close(tokens, expected, rtol=0, atol=1e-5)
            total += gradient
        valid = source.ne(1).T.unsqueeze(-1)
        got = torch.autograd.grad((out.square() * valid).sum(), model.encoder.embed_tokens.weight)[0]
        torch.testing.assert_close(got, total, rtol=1e-4, atol=1e-4)


def test_architectures_have_the_sizes_of_fairseq() -> None:
    from fairseq.models import ARCH_CONFIG_REGISTRY

    for ours, theirs in (
        ("sinkformer", "transformer"),
        ("sinkformer_iwslt_de_en", "transformer_iwslt_de_en"),
        ("sinkformer_tiny", "transformer_tiny"),
    ):
        args, stock = Namespace(), Namespace()
        ARCH_CONFIG_REGISTRY[ours](args)
        ARCH_CONFIG_REGISTRY[theirs](stock)
        added = {name: value for name, value in vars(args).items() if name not in vars(stock)}
        assert added == {
            "sinkhorn_iters": 3,
            "sinkhorn_gradient": "unrolled",
            "attention_normalizer": "sinkhorn",
            "attention_normalizer_options": "{}",
            "sinkhorn_layers": "all",
        }
        assert {name: getattr(args, name) for name in vars(stock)} == vars(stock)


def test_only_the_encoder_is_converted() -> None:
    from fairseq.modules import MultiheadAttention

    model = build(attention_normalizer="unbalanced_sinkhorn", attention_normalizer_options='{"rho": 4.0}')
    assert normalized(model) == [0, 1]
    assert [layer.self_attn.normalizer.rho for layer in model.encoder.layers] == [4.0, 4.0]
    for layer in model.decoder.layers:
        assert type(layer.self_attn) is type(layer.encoder_attn) is MultiheadAttention


@pytest.mark.parametrize(
    ("layers", "expected"),
    [
        ("all", [0, 1, 2, 3]),
        ("2", [2, 3]),
        (3, [1, 2, 3]),
        ("0,2", [0, 2]),
        ("[0]", [0]),
        ("1,", [1]),
        ([0, -1], [0, 3]),
        ("encoder.layers.[12].*", [1, 2]),
    ],
)
def test_layers_are_selected(layers: Any, expected: list[int]) -> None:
    model = build(sinkhorn_layers=layers, encoder_layers=4)
    assert normalized(model) == expected
    assert len(model.encoder.layers) == 4


@pytest.mark.parametrize("layers", ["0", "5", "0,4", "decoder.*", "[]"])
def test_layers_that_do_not_exist_are_named(layers: str) -> None:
    with pytest.raises(ValueError, match=r"--sinkhorn-layers .*layers"):
        build(sinkhorn_layers=layers, encoder_layers=4)


def test_a_pruned_encoder_keeps_the_attention_of_each_layer() -> None:
    trained = build(sinkhorn_layers="0,2", encoder_layers=4, encoder_layerdrop=0.3)
    args = {"sinkhorn_layers": "0,2", "encoder_layers": 4, "encoder_layerdrop": 0.3}
    for keep in ("1,2,3", [3, 1, 2]):
        pruned = build(**args, encoder_layers_to_keep=keep)
        assert normalized(pruned) == [1]
    pruned = build(**args, encoder_layers_to_keep="1,2,3").eval()
    config = Namespace(arch="sinkformer_tiny", encoder_layers_to_keep="1,2,3", decoder_layers_to_keep="0,1")
    pruned.load_state_dict(trained.state_dict(), model_cfg=config)
    x = torch.randn(5, 2, 16)
    for old, new in zip(list(trained.eval().encoder.layers)[1:], pruned.encoder.layers, strict=True):
        torch.testing.assert_close(new(x, None), old(x, None))
    assert normalized(build(**args, encoder_layers_to_keep="1,3")) == []


def test_a_lost_option_is_loud_and_bad_ones_are_named() -> None:
    from fairseq.models import ARCH_CONFIG_REGISTRY
    from fairseq_sinkhorn import SinkformerModel

    args = Namespace(**TINY)
    ARCH_CONFIG_REGISTRY["sinkformer_tiny"](args)
    del args.sinkhorn_iters
    with pytest.raises(AttributeError, match="sinkhorn_iters"):
        SinkformerModel.build_model(args, build_task())
    with pytest.raises(ValueError, match="must be JSON"):
        build(attention_normalizer_options="rho=3")
    with pytest.raises(ValueError, match="must be a JSON object"):
        build(attention_normalizer_options="3")
    with pytest.raises(ValueError, match="has no option rho"):
        build(attention_normalizer_options='{"rho": 3}')
    with pytest.raises(ValueError, match="n_iters has an option of its own, --sinkhorn-iters"):
        build(attention_normalizer_options='{"n_iters": 7}')
    with pytest.raises(ValueError, match="'softmax' has no half-steps: --sinkhorn-iters 5 would change nothing"):
        build(attention_normalizer="softmax", sinkhorn_iters=5)


def build_task() -> Any:
    from fairseq.data import Dictionary

    dictionary = Dictionary()
    return types.SimpleNamespace(source_dictionary=dictionary, target_dictionary=dictionary)


def test_options_come_from_hydra_as_well() -> None:
    from fairseq import models
    from omegaconf import OmegaConf

    config = OmegaConf.create({"_name": "sinkformer_tiny", **TINY, "sinkhorn_iters": 5, "sinkhorn_layers": [1]})
    OmegaConf.set_struct(config, True)
    model = models.build_model(config, build_task())
    assert normalized(model) == [1]
    normalizer = model.encoder.layers[1].self_attn.normalizer
    assert (normalizer.n_iters, normalizer.gradient) == (5, "unrolled")


def test_the_command_line_has_every_option_and_no_default() -> None:
    from fairseq_sinkhorn import SinkformerModel

    parser = ArgumentParser(argument_default=None)
    SinkformerModel.add_args(parser)
    args = parser.parse_args(["--sinkhorn-iters", "7", "--attention-normalizer", "softmax", "--sinkhorn-layers", "0,1"])
    assert (args.sinkhorn_iters, args.attention_normalizer, args.sinkhorn_layers) == (7, "softmax", "0,1")
    assert args.sinkhorn_gradient is None
    with pytest.raises(SystemExit):
        parser.parse_args(["--attention-normalizer", "sinkhron"])


def gradients(model: Any) -> list[torch.Tensor]:
    model.zero_grad()
    loss(model, batch(SENTENCES), batch(SENTENCES, left=False)).backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


def test_checkpointed_activations_give_the_same_gradients() -> None:
    plain = build(sinkhorn_layers="0,1", encoder_layers=3)
    saving = build(sinkhorn_layers="0,1", encoder_layers=3, checkpoint_activations=True)
    saving.load_state_dict(plain.state_dict())
    assert all(hasattr(layer, "precheckpoint_forward") for layer in saving.encoder.layers)
    for ours, theirs in zip(gradients(saving), gradients(plain), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_layers_are_wrapped_for_fsdp_as_in_fairseq(monkeypatch: pytest.MonkeyPatch) -> None:
    """The package that fairseq wraps with is replaced by one that marks what it is given."""

    def wrap(module: Any, **kwargs: Any) -> Any:
        module.wrapped = True
        return module

    fairscale = types.ModuleType("fairscale.nn")
    fairscale.wrap = wrap  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "fairscale", types.ModuleType("fairscale"))
    monkeypatch.setitem(sys.modules, "fairscale.nn", fairscale)

    def marks(**options: Any) -> list[bool]:
        return [hasattr(layer, "wrapped") for layer in build(sinkhorn_layers="1", **options).encoder.layers]

    assert marks(min_params_to_wrap=1) == [True, True]
    assert marks(min_params_to_wrap=10**8) == [False, False]
    assert marks(min_params_to_wrap=10**8, checkpoint_activations=True) == [True, True]


def test_layerdrop_drops_whole_layers() -> None:
    model = build(encoder_layerdrop=0.5, encoder_layers=4)
    assert type(model.encoder.layers).__name__ == "LayerDropModuleList"
    source = batch(SENTENCES)
    drawn = {model.encoder(source)["encoder_out"][0].sum().item() for _ in range(20)}
    assert len(drawn) > 3
    model.eval()
    first, second = (model.encoder(source)["encoder_out"][0] for _ in range(2))
    assert torch.equal(first, second)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_near_and_finite(dtype: torch.dtype) -> None:
    model = build(sinkhorn_iters=5)
    source, target = batch(SENTENCES), batch(SENTENCES, left=False)
    exact = loss(model, source, target)
    narrow = copy.deepcopy(model).to(dtype)
    value = loss(narrow, source, target)
    torch.testing.assert_close(value.float(), exact, rtol=0.02, atol=0.0)
    value.backward()
    assert all(parameter.grad.isfinite().all() for parameter in narrow.parameters())


def test_registration_may_be_repeated_and_stays_one_model(plugin: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package that is installed and given as --user-dir, too, is imported once; a reload does no harm."""
    import importlib
    from pathlib import Path

    from fairseq import utils
    from fairseq.models import ARCH_MODEL_REGISTRY, MODEL_REGISTRY

    folder = Path(plugin.__file__ or "").parent
    registered = MODEL_REGISTRY["sinkformer"]
    monkeypatch.chdir(folder.parent)
    for user_dir in (str(folder), "fairseq_sinkhorn", "../plugins/fairseq_sinkhorn/"):
        utils.import_user_module(Namespace(user_dir=user_dir.rstrip("/")))
    assert sys.modules["fairseq_sinkhorn"] is plugin
    old = sys.modules["fairseq_sinkhorn.translation"]
    monkeypatch.setitem(sys.modules, "fairseq_sinkhorn.translation", old)
    monkeypatch.delitem(sys.modules, "fairseq_sinkhorn.translation")
    again = importlib.import_module("fairseq_sinkhorn.translation")
    assert again is not old
    assert again.SinkformerModel is registered is MODEL_REGISTRY["sinkformer"]
    assert ARCH_MODEL_REGISTRY["sinkformer_iwslt_de_en"] is registered
