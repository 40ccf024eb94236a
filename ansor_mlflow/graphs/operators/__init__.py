"""Operators rewritten, a file for each family of them."""
