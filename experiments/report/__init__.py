"""The report of finished runs: `python -m experiments.report runs/mnist_patches`."""
