"""A run's processes: planning them, starting them, watching over them, and replacing those that die."""
