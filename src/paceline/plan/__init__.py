"""Predict what speculation is worth on a machine: throughput, latency, pipelines, plans."""
