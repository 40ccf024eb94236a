"""Parts of `latency.py`."""
