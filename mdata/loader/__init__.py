"""Batches for each rank: samplers, batch sizes, prefetching."""
