"""`python -m kvd.tools.demo`."""

from kvd.tools.demo.app import main

main()
