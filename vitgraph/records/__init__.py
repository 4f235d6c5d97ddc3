"""What a run leaves behind: its record, its samples, and what is derived from them. Nothing here imports torch."""
