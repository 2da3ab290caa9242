"""Configurations, in groups as those of the suite."""
