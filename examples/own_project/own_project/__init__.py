"""A data set, a normalizer, a model and an experiment of one's own."""
