"""The daemon process: sockets, the loop that feeds the core, the workers that do its transfers.

The law of this package: one thread (the loop) owns the core, the sessions and the sockets. Worker
threads touch payload bytes only, and tell the loop what they did through one queue.
"""
