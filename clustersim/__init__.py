"""clustersim: a discrete-event simulator of data-parallel training on GPU clusters."""
