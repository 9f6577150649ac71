"""Sending what a run writes to trackers, from a process of its own that outlives the ranks."""
