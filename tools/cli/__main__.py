"""`python -m kvd.tools.cli` is kvd-cli."""

from kvd.tools.cli import main

main()
