"""The engines: ways of computing one `Problem`, and which of them a backend is.

    native      C++ on a CPU, where its library was built (native.py, native_library.py, cpp/)
    portable    torch's own operations, any device (portable.py): exponential.py where the range of floating numbers
                allows it, log_domain.py elsewhere, both with the loop of half_steps.py
    triton      kernels for CUDA devices (triton.py), which "auto" takes for what it has proven (proof.py)
    implicit    the derivative at convergence, by its equations (implicit.py)

Another engine is a class with the methods of `operator.Engine`, a name in `BACKENDS`, and its operator in `_OPERATORS`.
"""

import torch

from .native import LIBRARY, Native, describe_cpu_engine, load_triton
from .operator import Operator
from .portable import Portable

#: Names of `backend=`. "auto" is the native engine on a CPU that it was built for, the Triton engine on a CUDA device
#: where it has been proven, and the portable one elsewhere; "streaming" is the same without keeping a map between
#: half-steps; "dense" is an old name of "portable".
BACKENDS = ("auto", "reference", "native", "portable", "dense", "streaming", "triton")

PORTABLE = Operator(Portable("portable"))
AUTO = Operator(Native("auto"))
NATIVE = Operator(Native("native", alone=True))
STREAMING = Operator(Native("streaming", recompute=True))
_OPERATORS = {"auto": AUTO, "native": NATIVE, "portable": PORTABLE, "dense": PORTABLE, "streaming": STREAMING}


def operator_of(backend: str) -> Operator:
    """The operator behind a backend other than "reference".

    Raises:
        NotImplementedError: where the backend's package is missing.
    """
    return load_triton() if backend == "triton" else _OPERATORS[backend]


def describe_engines() -> dict[str, str]:
    """What there is of each engine on this machine, or why it isn't there, in words."""
    native = describe_cpu_engine() if LIBRARY.load() is not None else f"not here: {LIBRARY.reason}"
    try:
        from .triton import refusal

        reason = refusal(torch.device("cuda" if torch.cuda.is_available() else "cpu"), torch.float32, 16, 16)
    except ImportError:
        reason = "the triton package"
    return {
        "native": native,
        "portable": "torch's own operations, on any device",
        "triton": "kernels for CUDA devices" if reason is None else f"not here: it needs {reason}",
        "reference": "the definition, with second derivatives",
    }
