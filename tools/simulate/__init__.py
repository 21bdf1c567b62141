"""Replay of request traces through the classes of `kvd.eviction`."""
