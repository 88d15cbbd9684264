"""Collectives: what NCCL (or Gloo, or a textbook) would do with a request on a group."""
