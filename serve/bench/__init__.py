"""Benchmarks: workloads that are played on engines, and what is said about the numbers."""
