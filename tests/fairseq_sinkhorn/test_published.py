import json
import math
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "nlp.json").read_text(encoding="utf-8"))
VOCABULARY = ["[PAD]", "[UNK]", *(f"word{number}" for number in range(2, 50))]
HEAD = "sentence_classification_head"
SIZES = {
    "encoder_embed_dim": 32,
    "encoder_ffn_embed_dim": 64,
    "encoder_layers": 2,
    "encoder_attention_heads": 4,
    "max_positions": 24,
}


def published_state_dict() -> dict[str, torch.Tensor]:
    """The weights of tests/golden/nlp.json, by the formula that its values were made with."""
    state = {}
    for k, (name, shape) in enumerate(GOLDEN["params"].items()):
        scale = 0.3 if any(part in name for part in ("WQ", "WK")) else 0.08
        values = scale * torch.sin(0.7 * torch.arange(math.prod(shape), dtype=torch.float64) + 1.3 * k)
        if "norm" in name and name.endswith("weight"):
            values += 1.0
        state[name] = values.float().reshape(shape)
    return state


def build(**options: Any) -> Any:
    from fairseq import models
    from fairseq.data import Dictionary

    dictionary = Dictionary()
    for symbol in reversed(VOCABULARY[2:]):  # another order than the published one
        dictionary.add_symbol(symbol)
    args = Namespace(arch="sinkformer_sentiment_imdb_official", **{**SIZES, **options})
    return models.build_model(args, SimpleNamespace(source_dictionary=dictionary)).eval()


def loaded(**options: Any) -> Any:
    from fairseq_sinkhorn import load_published_state_dict

    model = build(**options)
    load_published_state_dict(model, published_state_dict(), VOCABULARY)
    return model


def tokens(model: Any, length: int = 24) -> torch.Tensor:
    rows = [
        [(7 * position + 3 * row) % 49 + 1 if position < real else 0 for position in range(length)]
        for row, real in enumerate((24, 15, 7))
    ]
    dictionary = model.encoder.dictionary
    number = {"[PAD]": dictionary.pad(), "[UNK]": dictionary.unk()}
    return torch.tensor([[number.get(VOCABULARY[i], dictionary.index(VOCABULARY[i])) for i in row] for row in rows])


@pytest.mark.parametrize("half_steps", [1, 3])
def test_values_and_gradient_of_the_published_code(half_steps: int) -> None:
    model = loaded(sinkhorn_iters=half_steps)
    golden = GOLDEN[f"nlp_T{half_steps}"]
    out, _ = model(tokens(model), features_only=True, classification_head_name=HEAD)
    assert list(out.shape) == golden["shape"]
    torch.testing.assert_close(out.flatten(), torch.tensor(golden["out"]), rtol=1e-5, atol=0)
    (out * torch.linspace(-1, 1, 6).reshape(3, 2)).sum().backward()
    norm = model.encoder.embed_tokens.weight.grad.norm().item()
    assert norm == pytest.approx(golden["emb_grad_norm"], rel=1e-5)


@pytest.mark.parametrize(
    "sound",
    [
        {"published_padding": "hidden"},
        {"published_pooling": "tokens"},
        {"published_output": "logits"},
        {"sinkhorn_gradient": "unrolled"},
    ],
    ids=lambda options: next(iter(options)),
)
def test_each_deviation_can_be_taken_back(sound: dict[str, str]) -> None:
    """And each of them is seen by the golden values, so that none can get lost."""
    model = loaded(sinkhorn_iters=3, **sound)
    out, _ = model(tokens(model), classification_head_name=HEAD)
    golden = GOLDEN["nlp_T3"]
    (out * torch.linspace(-1, 1, 6).reshape(3, 2)).sum().backward()
    norm = model.encoder.embed_tokens.weight.grad.norm().item()
    same_values = torch.allclose(out.flatten(), torch.tensor(golden["out"]), rtol=1e-5, atol=0)
    assert same_values == ("sinkhorn_gradient" in sound)
    assert norm != pytest.approx(golden["emb_grad_norm"], rel=1e-4)
    if "published_output" in sound:
        torch.testing.assert_close(out.softmax(-1).flatten(), torch.tensor(golden["out"]), rtol=1e-5, atol=0)


def test_every_sentence_is_padded_to_the_full_length() -> None:
    """Padded queries take a share of the columns, so the published values depend on the length padded to."""
    model = loaded()
    full, _ = model(tokens(model), classification_head_name=HEAD)
    short, _ = model(tokens(model)[1:, :15], classification_head_name=HEAD)
    torch.testing.assert_close(short, full[1:])
    with pytest.raises(ValueError, match=r"30 tokens.*table has 24.*--shorten-method truncate"):
        model(tokens(model, length=30), classification_head_name=HEAD)


def test_with_hidden_padding_and_pooling_over_tokens_the_length_does_not_matter() -> None:
    model = loaded(published_padding="hidden", published_pooling="tokens", sinkhorn_iters=4)
    ids = tokens(model)
    batch, _ = model(ids, classification_head_name=HEAD)
    for row, real in enumerate((24, 15, 7)):
        alone, _ = model(ids[row : row + 1, :real], classification_head_name=HEAD)
        torch.testing.assert_close(alone[0], batch[row])


def test_positions_are_noise_and_frozen_or_sinusoidal() -> None:
    torch.manual_seed(0)
    noise = build().encoder.embed_positions.weight
    assert not noise.requires_grad
    assert noise.shape == (25, 32)
    assert noise.std().item() == pytest.approx(1.0, abs=0.1)
    table = build(published_positions="sinusoidal").encoder.embed_positions.weight
    assert not table.requires_grad
    assert table[0].eq(0).all()
    assert table[7, 0].item() == pytest.approx(math.sin(7))
    assert table[7, 5].item() == pytest.approx(math.cos(7 / 10000 ** (4 / 32)))


def test_the_size_of_the_published_model() -> None:
    model = build(
        encoder_embed_dim=256,
        encoder_ffn_embed_dim=1024,
        encoder_layers=6,
        encoder_attention_heads=8,
        max_positions=512,
    )
    model.register_classification_head(HEAD, num_classes=2)
    layer = 4 * (256 * 256 + 256) + 2 * 256 * 1024 + 1024 + 256 + 4 * 256
    vocabulary = len(model.encoder.dictionary)
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    assert trained == vocabulary * 256 + 6 * layer + 2 * 256 + 2
    assert 16_000 * 256 + 6 * layer + 2 * 256 + 2 == pytest.approx(8.84e6, rel=1e-3)  # with the published vocabulary


def test_bad_checkpoints_and_options_are_named() -> None:
    from fairseq_sinkhorn import load_published_state_dict

    model, state = build(), published_state_dict()
    with pytest.raises(ValueError, match=r"'layers\.0\.mha\.WO\.weight' is no entry"):
        load_published_state_dict(model, {**state, "layers.0.mha.WO.weight": torch.zeros(1)}, VOCABULARY)
    with pytest.raises(ValueError, match="vocabulary of 49 symbols for a checkpoint with 50"):
        load_published_state_dict(model, state, VOCABULARY[1:])
    with pytest.raises(ValueError, match="lacks 1 symbols of the vocabulary, such as 'other'"):
        load_published_state_dict(model, state, [*VOCABULARY[:-1], "other"])
    del state["linear.bias"]
    with pytest.raises(RuntimeError, match="Missing key"):
        load_published_state_dict(model, state, VOCABULARY)
    with pytest.raises(ValueError, match="for odd counts only"):
        build(sinkhorn_iters=4)
    with pytest.raises(ValueError, match="--published-padding must be one of queries, hidden"):
        build(published_padding="none")
    with pytest.raises(ValueError, match="same attention in all layers"):
        build(sinkhorn_layers="0")
