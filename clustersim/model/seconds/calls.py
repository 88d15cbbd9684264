"""What a function takes the host, in calls of a module (:mod:`clustersim.model.seconds.host`)."""

POST = 0.25
"""What posting an exchange takes, in calls of a module: a function of torch.distributed inside a module that was called
already. Megatron-LM's functional tests of dense models on H100 with no tensor parallelism, with it, and with sequence
parallelism are 3, 5 and 6 % too fast by it; as whole calls 21 % too fast, 14 and 20 % too slow."""
