"""Adapters between engines and kvd.

This package imports nothing: `import kvd.connectors` must not pull in an engine. Import the one
connector that you need, e.g. `from kvd.connectors.transformers import KvdCache`.
"""
