"""A scenario run again with something changed: faster rates, other strategies, other ranks."""
