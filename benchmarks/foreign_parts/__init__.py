"""Parts of the benchmark `foreign.py`."""
