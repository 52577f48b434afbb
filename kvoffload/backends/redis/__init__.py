"""The Redis tier: chunks as values of a server, a cluster, or what Sentinels name."""
