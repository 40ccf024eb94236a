"""Parts of `fleet.py`."""
