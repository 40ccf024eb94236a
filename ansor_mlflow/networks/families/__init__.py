"""The families of built-in networks, a module each."""
