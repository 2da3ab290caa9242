"""Figures of the paper, drawn anew: `python -m experiments.figures NAME`.

A figure is a module of this package with `TITLE`, a sentence; `add_options(parser)`; and `draw(options) -> Drawn`.
`NAMES` is the registry.
"""

#: The figures, in the order of the paper; each is a module of this package.
NAMES = ("normalizations", "column_sums", "convergence")
