"""Commands around the steps: what plans, explains, compares, checks, and runs several of them."""
