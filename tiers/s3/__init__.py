"""The S3 tier: one object a chunk, with the record inside.

The law of this package: an object's name follows from the chunk's key and nothing else, so that
daemons that share a bucket find each other's chunks; what an object says about itself is believed
only after its record and digest hold; and nothing is deleted that this installation did not write.
boto3 is imported when a tier is started, and not before.
"""

from kvd.tiers.s3.backend import S3Backend
from kvd.tiers.s3.config import S3Config

__all__ = ["S3Backend", "S3Config"]
