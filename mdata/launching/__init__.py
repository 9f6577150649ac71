"""A job's parts started on processes, Slurm or Ray, and how far they are, told from the job's folder alone.

The engines queue, place and restart; nothing here keeps a process of its own, and no document passes through it.
"""
