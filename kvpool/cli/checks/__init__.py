"""What `kvpool doctor` checks: facts are gathered in one place, and judged by functions that know nothing else."""
