"""Output of saved runs: console tables, CSV, plots. Nothing here imports torch."""
