"""Runs on a SLURM cluster: plan and submit sweeps, watch them, cancel them, and upload their logs."""
