"""A run's processes: planning them, starting them, watching over them, and replacing those that die."""

from sfactory.errors import check_platform

check_platform()  # before a module is imported that only Linux has
