"""Files <-> Timeline or Samples."""
