"""Records on their way: digests of a tuning's files, parts of a growing database, objects of a pool."""
