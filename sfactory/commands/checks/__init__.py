"""The checks of ``sfactory check``: what they play with, what they look for, and what they advise."""
