"""From a dataset to the batches of a step: which rows, for which rank, read ahead.

`sampler` and `batch_sizes` decide, by arithmetic on consumed samples (`megatron_sampler`: as Megatron does); `loader`
makes batches and `prefetch` reads them ahead; `places` says where samples lie, for whoever waits for them.
"""
