"""Real engines as processes, for the demo, for kvd-bench and for the tests of engines."""
