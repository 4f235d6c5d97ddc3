"""The commands, from a spec to work to a report; those that do alike share a file."""
