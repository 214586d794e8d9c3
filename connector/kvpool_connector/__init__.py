"""What engines load to use a pool: one folder for each engine, and what these share."""
