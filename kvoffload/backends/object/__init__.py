"""The object store backend: one object a chunk in a bucket of S3, Google Cloud or Azure."""
