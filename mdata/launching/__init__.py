"""Starting the parts of a job as local processes, on Slurm or on Ray, and its progress, from the job's folder alone.

The engines queue, place and restart tasks; this package runs no process of its own, and no document passes through it.
"""
