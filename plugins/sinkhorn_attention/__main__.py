"""`python -m sinkhorn_attention`: which engines this machine has, and which one `backend="auto"` takes for what."""

import importlib.metadata

import torch

from .engines import describe_engines
from .engines.native import describe_cpu_engine


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
    print("  given scores, other devices portable")


if __name__ == "__main__":
    main()
