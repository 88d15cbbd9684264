#!/bin/bash
torchrun --nproc_per_node=8 --nnodes=4 scripts/train.py configs/small.yaml --device_train_microbatch_size=4 \
    --global_train_batch_size=1024 --fsdp.sharding_strategy=SHARD_GRAD_OP --run_name=again
