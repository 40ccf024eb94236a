"""Parts of the benchmark `tuning_throughput.py`: the two sides, what they report, and how they are compared."""
