"""The entry points as functions of their options; here the tuner and MLflow meet.

The wings `tuning`, `compiling`, `promotion`, `records`, `reports` and `doctor` are rooms of their own; `evaluate`,
`pipeline` and `sync` are steps of one file. This module imports none of them, so that a command loads only what it
needs.
"""
