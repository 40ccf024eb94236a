"""The search of one task: the space, proposals, and what becomes of them."""
