"""The Redis backend: one value a chunk on a server, a cluster, or the master of Sentinels."""
