"""Measurements that take minutes; run from the root of a clone."""
