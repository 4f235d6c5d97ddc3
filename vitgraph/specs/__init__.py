"""What a command is asked: a field of a spec is an option, a key of a config file and a recorded setting."""
