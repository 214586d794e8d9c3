"""What every process of the pool needs to be operated: settings and logs."""
