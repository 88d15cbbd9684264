"""A measured trace played again: on its own machine, on another, on more ranks."""
