"""The disk tier: chunks as files under a root that processes share."""
