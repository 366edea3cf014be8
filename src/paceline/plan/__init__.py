"""What speculation is worth on a machine, said before anyone rents it: throughput, latency, pipelines, plans."""
