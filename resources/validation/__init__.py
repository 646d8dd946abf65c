"""Judging what the programs measured of a dataset version, and showing it. Measures are `recipes.validation`."""
