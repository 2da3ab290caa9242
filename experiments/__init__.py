"""Experiments of the suite: training, evaluation, data, reports. `python -m experiments.train` is the way in."""
