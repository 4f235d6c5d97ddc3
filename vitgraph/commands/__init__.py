"""The commands: one file each, from a spec to work to a report."""
