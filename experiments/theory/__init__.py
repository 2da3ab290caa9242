"""The theory, runnable: statements about Sinkhorn attention as checks, each with a number, a table and a picture.

`python -m experiments.theory NAME [key=value ...]` runs one, `python -m experiments.theory all` all of them.
"""
