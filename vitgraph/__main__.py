"""`python -m vitgraph`."""

from vitgraph.cli import main

main()
