"""The file of a scenario: what it may say, and how it is read."""
