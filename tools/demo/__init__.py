"""`python -m kvd.tools.demo`: a real model answers over a document, cold and warm."""
