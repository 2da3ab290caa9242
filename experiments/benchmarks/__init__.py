"""Time and memory of attention against its peers. `make bench` prints the tables; nothing here gates anything by time.

Every measurement runs in a process of its own (`worker.py`), in which the variants of one comparison take turns, so
that a change of the machine's load meets all of them. Figures are medians with quartiles; ratios are medians of the
ratios within a round.
"""
