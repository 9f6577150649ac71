"""A training run as one job of this machine, Slurm or Kubernetes: its record, batch file and status."""
