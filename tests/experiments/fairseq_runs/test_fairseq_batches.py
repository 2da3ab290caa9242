"""Which sentences each process gets, tried in a process of its own: fairseq changes logging for the whole process."""

import importlib.util
import json
import subprocess
import sys

import pytest

PROGRAM = """
import json
import torch
from experiments.runners.fairseq_batches import DividedBatches, filled

class Sentences(torch.utils.data.Dataset):
    supports_prefetch = False
    def __getitem__(self, index):
        return index
    def __len__(self):
        return 100

batches = [list(range(start, min(start + size, 100))) for start, size in ((0, 3), (3, 40), (43, 1), (44, 30), (74, 26))]
found = {}
for world in range(1, 65):
    order = []
    for shard in range(world):
        made = DividedBatches(Sentences(), list, batches, num_shards=world, shard_id=shard, seed=7)
        assert made.first_batch == [0]
        order.append([list(part) for part in made.next_epoch_itr(shuffle=True)])
    steps = [sorted(sum(parts, [])) for parts in zip(*order, strict=True)]
    assert max(len(p) for parts in order for p in parts) <= -(-40 // world)
    found[world] = steps
assert filled([{}, {"id": 1}, {}]) == [{"id": 1}]
assert filled([{}, {}]) == [{}]
print(json.dumps([sorted(map(tuple, found[1])) == sorted(map(tuple, map(sorted, batches))),
                  [world for world in found if found[world] != found[1]]]))
"""


def test_a_step_has_the_same_sentences_whatever_the_number_of_processes() -> None:
    if importlib.util.find_spec("fairseq") is None:
        pytest.skip("fairseq is not installed")
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout.splitlines()[-1]) == [True, []]
