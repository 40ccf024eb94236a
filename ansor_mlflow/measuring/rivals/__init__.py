"""The runtimes that a user could have taken instead."""
