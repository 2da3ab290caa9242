"""`python -m sinkhorn_attention`: which engines this machine has, and which one `backend="auto"` takes for what."""

import importlib.metadata

import torch

from .engines import describe_engines
from .engines.native import describe_cpu_engine, describe_device_engine
from .functional import sinkhorn_attention


def describe_cuda_engine() -> str:
    """What "auto" takes on the first CUDA device, after a proof in the three dtypes."""
    if not torch.cuda.is_available():
        return "not here: torch finds none"
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        query, key, value = torch.zeros(3, 2, 300, 64, dtype=dtype, device="cuda")
        for n_iters in (1, 4, 5):
            sinkhorn_attention(query, key, value, n_iters)
    return describe_device_engine() or "portable"


def main() -> None:
    """Prints the engines."""
    print(
        f"sinkhorn-attention {importlib.metadata.version('sinkhorn-attention')}, torch {torch.__version__}, "
        f"{torch.get_num_threads()} threads"
    )
    for name, text in describe_engines().items():
        print(f"  {name:<10} {text}")
    print('backend="auto" takes')
    print(f"  tokens on the CPU           {describe_cpu_engine()}")
    print(f"  tokens on a CUDA device     {describe_cuda_engine()}")
    print("  given scores, other devices portable")


if __name__ == "__main__":
    main()
