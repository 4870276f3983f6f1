"""Sweeps: many runs that differ in a few fields of their configuration, several at once, and the best of them.

``space`` reads what is searched, ``listed`` and ``study`` choose the trials, ``scheduler`` runs them, ``summary`` tells
what came of them, and ``slurm`` writes the script that has a cluster run them.
"""
