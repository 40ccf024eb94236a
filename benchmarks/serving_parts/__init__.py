"""The parts of `serving.py`."""
