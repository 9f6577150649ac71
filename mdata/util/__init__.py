"""Atomic file writes, keys for random draws, threads, machine limits, signals."""
