"""A training run as one job of this machine, Slurm or Kubernetes: its record, its batch file, how it stands."""
