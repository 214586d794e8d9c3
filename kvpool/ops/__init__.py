"""What every process of the pool needs to be operated: settings, logs, and what its gRPC servers share."""
