"""One module a kind of record: each builds the record's document, and nothing else."""
