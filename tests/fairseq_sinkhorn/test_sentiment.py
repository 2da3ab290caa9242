from argparse import ArgumentParser, Namespace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

SENTENCES = [[0, 4, 5, 6, 7, 8, 9, 2], [0, 10, 4, 2], [0, 7, 7, 5, 11, 2]]
HEAD = "sentence_classification_head"


def build(arch: str = "sinkformer_sentiment_tiny", **options: Any) -> Any:
    from fairseq import models
    from fairseq.data import Dictionary

    dictionary = Dictionary()
    for symbol in "abcdefgh":
        dictionary.add_symbol(symbol)
    model = models.build_model(Namespace(arch=arch, **options), SimpleNamespace(source_dictionary=dictionary))
    model.register_classification_head(HEAD, num_classes=2)
    return model


def batch(sentences: list[list[int]], left: bool = False, extra: int = 0) -> torch.Tensor:
    length = max(map(len, sentences)) + extra
    pads = [[1] * (length - len(sentence)) for sentence in sentences]
    return torch.tensor([pad + list(s) if left else list(s) + pad for pad, s in zip(pads, sentences, strict=True)])


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("pooling", ["max", "mean", "first"])
@pytest.mark.parametrize("n_iters", [1, 2, 3])
def test_logits_see_neither_padding_nor_neighbours(pooling: str, n_iters: int, train: bool) -> None:
    model = build(pooling=pooling, sinkhorn_iters=n_iters, dropout=0.0).train(train)
    alone = torch.cat([model(batch([sentence]), classification_head_name=HEAD)[0] for sentence in SENTENCES])
    for left, extra in ((False, 0), (False, 4), (True, 2)):
        logits, _ = model(batch(SENTENCES, left, extra), features_only=True, classification_head_name=HEAD)
        torch.testing.assert_close(logits, alone, rtol=0, atol=1e-5)


def test_poolings_are_over_tokens_alone() -> None:
    from fairseq_sinkhorn.sentiment import pool_tokens

    features = torch.tensor([[[9.0, -9.0], [-1.0, -2.0], [-3.0, -1.0]], [[-5.0, -4.0], [8.0, 8.0], [8.0, 8.0]]])
    keep = torch.tensor([[False, True, True], [True, False, False]])
    for pooling, expected in (("max", [-1.0, -1.0]), ("mean", [-2.0, -1.5]), ("first", [-1.0, -2.0])):
        pooled = pool_tokens(features, keep, pooling)
        torch.testing.assert_close(pooled, torch.tensor([expected, [-5.0, -4.0]]))
        assert pool_tokens(features, torch.zeros_like(keep), pooling).eq(0).all()
        half = pool_tokens(features.half(), keep, pooling)
        torch.testing.assert_close(half, pooled.half())
    with pytest.raises(ValueError, match="must be one of max, mean, first"):
        pool_tokens(features, keep, "sum")


def test_the_architecture_has_the_published_sizes() -> None:
    model = build("sinkformer_sentiment_imdb", encoder_layers=2)
    args, attention = model.args, model.encoder.sentence_encoder.layers[1].self_attn
    assert (args.encoder_embed_dim, args.encoder_ffn_embed_dim, args.max_positions) == (256, 1024, 512)
    assert (attention.num_heads, attention.head_dim, attention.normalizer.n_iters) == (8, 32, 3)
    assert not args.encoder_normalize_before
    assert model.encoder.max_positions() == 512
    defaults = Namespace()
    from fairseq.models import ARCH_CONFIG_REGISTRY

    ARCH_CONFIG_REGISTRY["sinkformer_sentiment_imdb"](defaults)
    assert (defaults.encoder_layers, defaults.pooling) == (6, "max")


def test_weights_go_from_softmax_to_sinkhorn_and_back() -> None:
    softmax, sinkhorn = build(attention_normalizer="softmax", dropout=0.0), build(sinkhorn_iters=1, dropout=0.0)
    assert list(softmax.state_dict()) == list(sinkhorn.state_dict())
    sinkhorn.load_state_dict(softmax.state_dict())
    logits = [model(batch(SENTENCES), classification_head_name=HEAD)[0] for model in (softmax, sinkhorn)]
    torch.testing.assert_close(logits[1], logits[0])


def test_gradients_are_the_same_with_checkpointed_activations() -> None:
    plain = build(dropout=0.0, sinkhorn_layers="1", encoder_layers=3)
    saving = build(dropout=0.0, sinkhorn_layers="1", encoder_layers=3, checkpoint_activations=True)
    saving.load_state_dict(plain.state_dict())
    grads = []
    for model in (plain, saving):
        logits, _ = model(batch(SENTENCES), classification_head_name=HEAD)
        torch.nn.functional.cross_entropy(logits, torch.tensor([0, 1, 1])).backward()
        grads.append([parameter.grad for parameter in model.parameters()])
    for ours, theirs in zip(*grads, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_options_of_the_command_line() -> None:
    from fairseq.models import ARCH_MODEL_REGISTRY

    for arch in ("sinkformer_sentiment_imdb", "sinkformer_sentiment_imdb_official"):
        parser = ArgumentParser(argument_default=None)
        ARCH_MODEL_REGISTRY[arch].add_args(parser)
        args = parser.parse_args(["--encoder-layers", "3", "--dropout", "0.2", "--sinkhorn-gradient", "detached"])
        assert (args.encoder_layers, args.dropout, args.sinkhorn_gradient) == (3, 0.2, "detached")
        assert args.sinkhorn_iters is None
    with pytest.raises(ValueError, match="--pooling must be one of"):
        build(pooling="sum")
