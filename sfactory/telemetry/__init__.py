"""What a run tells: shared counters, stopwatches, metrics and their files, and the display."""
