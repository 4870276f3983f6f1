"""Engines: the ways in which a policy worker computes its model's answers. All give the same numbers."""
