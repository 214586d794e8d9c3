"""Workloads, trace replay and the reference engine: what the demo and the benchmarks run against a pool."""
