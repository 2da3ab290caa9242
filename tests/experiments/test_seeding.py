import torch

from experiments.seeding import generator, stream_seed


def test_a_seed_depends_on_its_purpose_and_every_number():
    seeds = [stream_seed("shuffle", 0, 0), stream_seed("augment", 0, 0), stream_seed("shuffle", 0, 1)]
    seeds += [stream_seed("shuffle", 1, 0), stream_seed("shuffle", 0)]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**64 for seed in seeds)


def test_seeds_are_the_same_everywhere():
    """Stored runs must be repeatable: these numbers are part of the format."""
    assert stream_seed("shuffle", 0, 0) == 7124977919368233133
    assert torch.equal(generator("shuffle", 0, 0).get_state(), generator("shuffle", 0, 0).get_state())
