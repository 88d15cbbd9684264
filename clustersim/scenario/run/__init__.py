"""One run of a scenario: the parts that it needs, what is done to them, and the run."""
