import json
import math
from pathlib import Path

import pytest
import torch
from pyg_sinkhorn import SetTransformer, create_model, load_published_state_dict, to_published_state_dict

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "set.json").read_text())


def published_weights():
    """The weights that the golden values were computed with, by formula, in the published state dict's order."""
    state = {}
    for k, (name, shape) in enumerate(GOLDEN["params"].items()):
        amplitude = 0.3 if any(part in name for part in ("fc_q", "fc_k")) else 0.08
        j = torch.arange(math.prod(shape), dtype=torch.float64)
        weight = amplitude * torch.sin(0.7 * j + 1.3 * k)
        if name.endswith(("ln0.weight", "ln1.weight")):
            weight += 1
        state[name] = weight.float().view(shape)
    return state


def golden_points():
    j = torch.arange(2 * 50 * 3, dtype=torch.float64)
    return torch.sin(0.9 * j + 0.05 * (j % 97) ** 1.5).float().view(2, 50, 3)


@pytest.mark.parametrize("n_iters", [1, 7])
def test_official_model_computes_what_the_published_code_computes(n_iters):
    expected = GOLDEN[f"set_T{n_iters}"]
    model = create_model("set_sinkformer_modelnet40_official", n_iters=n_iters).eval()
    load_published_state_dict(model, published_weights())
    points = golden_points().requires_grad_()
    logits = model(points)
    (gradient,) = torch.autograd.grad((logits * torch.linspace(-1, 1, 80).view(2, 40)).sum(), points)
    torch.testing.assert_close(logits[:, :8], torch.tensor(expected["out"]), rtol=1e-5, atol=0)
    torch.testing.assert_close(logits.sum(1), torch.tensor(expected["out_sum"]), rtol=1e-5, atol=0)
    assert gradient.norm().item() == pytest.approx(expected["grad_norm"], rel=1e-4)


@pytest.mark.parametrize("options", [{"row_mass": "one"}, {"scale": "head"}, {"n_iters": 3}, {"norm": "none"}])
def test_golden_values_tell_the_settings_apart(options):
    model = SetTransformer(**{"n_iters": 1, "row_mass": "uniform", **options}).eval()
    weights = published_weights()
    if options.get("norm") == "none":
        weights = {name: tensor for name, tensor in weights.items() if ".ln" not in name}
    load_published_state_dict(model, weights)
    off = (model(golden_points())[:, :8] / torch.tensor(GOLDEN["set_T1"]["out"]) - 1).abs().max()
    assert off > 1e-4


def test_published_weights_go_in_and_out_unchanged():
    weights = published_weights()
    model = create_model("set_sinkformer_modelnet40_official")
    load_published_state_dict(model, {f"module.{name}": tensor for name, tensor in weights.items()})
    written = to_published_state_dict(model)
    assert set(written) == set(weights) == set(GOLDEN["params"])
    assert all(torch.equal(written[name], tensor) for name, tensor in weights.items())
    assert sum(tensor.numel() for tensor in written.values()) == GOLDEN["count"] == 1_145_384


def test_what_does_not_fit_is_named():
    model = create_model("set_sinkformer_modelnet40_official")
    weights = published_weights()
    weights["dec.3.weight"] = weights["dec.3.weight"][:10]
    weights["enc.2.I"] = weights.pop("enc.1.I")
    with pytest.raises(
        ValueError, match=r"missing: enc\.1\.I; unexpected: enc\.2\.I; wrong shape: dec\.3\.weight \(10,"
    ):
        load_published_state_dict(model, weights)


def test_a_model_without_published_counterpart_says_so():
    with pytest.raises(ValueError, match=r"no counterpart of the parameter 'decoder\.0"):
        to_published_state_dict(SetTransformer(hidden=8, num_heads=2, decoder_blocks=1))
