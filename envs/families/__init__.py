"""Environments that come from other packages, one module for each."""
