"""`python -m kvd.tools.bench` is kvd-bench."""

from kvd.tools.bench import main

main()
