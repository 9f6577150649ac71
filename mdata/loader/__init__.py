"""Batches for each rank, read ahead: samplers, batch sizes, prefetching."""
