"""Exported programs of PyTorch as networks; nothing of them is unpickled or evaluated."""
