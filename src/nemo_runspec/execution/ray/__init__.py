"""Ray: a job for a cluster that exists, and a Ray of a job's own inside a Slurm allocation."""
