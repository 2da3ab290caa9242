"""How exactly products of float32 numbers are made: on a GPU they may be of TF32, which is several times as fast."""

import torch

#: What torch calls the precisions.
MATMUL_PRECISIONS = ("highest", "high", "medium")


def set_matmul_precision(device: torch.device, precision: str) -> None:
    """Sets it for this process, on a CUDA device; a CPU's products are of float32 whatever the configuration says.

    Args:
        device: of the run.
        precision: of `MATMUL_PRECISIONS`: "high" rounds factors to 11 bits (TF32), "medium" to 8 (bfloat16).

    Raises:
        ValueError: for another precision.
    """
    if precision not in MATMUL_PRECISIONS:
        raise ValueError(f"trainer.matmul_precision={precision}: it is one of {', '.join(MATMUL_PRECISIONS)}")
    torch.set_float32_matmul_precision(precision if device.type == "cuda" else "highest")
