"""Environments of other packages, one module for each family."""
