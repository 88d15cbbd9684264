"""Constants of a machine: measured on its GPUs (``capture``), fitted (``fit``), and checked against measured
collectives, by cases that they were not fitted to."""
