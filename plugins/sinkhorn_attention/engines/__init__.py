"""The engines: ways of computing one `Problem`, and which of them a backend is.

    portable    torch's own operations, any device (portable.py): exponential.py where the range of floating numbers
                allows it, log_domain.py elsewhere, both with the loop of half_steps.py
    triton      kernels for CUDA devices and up to 256 keys (triton.py)
    implicit    the derivative at convergence, by its equations (implicit.py)

Another engine is a class with the methods of `operator.Engine`, and a line in `operator_of`.
"""

from .operator import Operator
from .portable import Portable

#: Names of `backend=`. "dense" and "streaming" are the portable engine, which keeps the map between half-steps where it
#: is not too large, or makes blocks of it again for each.
BACKENDS = ("auto", "reference", "portable", "dense", "streaming", "triton")

PORTABLE = Operator(Portable("portable"))
RECOMPUTING = Operator(Portable("recomputing", recompute=True))
#: What "auto" is, on every device: no kernel is taken unasked that has not been run on the hardware it is for.
AUTO = PORTABLE


def operator_of(backend: str) -> Operator:
    """The operator behind a backend other than "reference".

    Raises:
        NotImplementedError: where the backend's package is missing.
    """
    if backend == "triton":
        try:
            from .triton import TRITON  # imported at its first use
        except ImportError as error:
            raise NotImplementedError(
                "backend='triton' needs the triton package, which comes with torch on Linux; use backend='auto'"
            ) from error
        return TRITON
    return RECOMPUTING if backend == "streaming" else AUTO if backend == "auto" else PORTABLE
