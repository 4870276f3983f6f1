"""Compiled passes over what groups of environments write."""
