"""What runs an experiment: the run's folder (`run_dir`) and the training loops."""
