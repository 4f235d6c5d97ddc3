"""What each kind of record holds as its result, one module a kind."""
