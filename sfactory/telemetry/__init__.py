"""Telemetry: events, the control block, stopwatches, traces, metrics and the display."""
