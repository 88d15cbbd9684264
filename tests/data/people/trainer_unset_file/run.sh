#!/bin/bash
torchrun --nnodes 1 --nproc_per_node 8 train.py --model_name_or_path Qwen/Qwen2.5-7B --bf16 True \
    --per_device_train_batch_size 1 --model_max_length 2048 --fsdp "full_shard auto_wrap" --fsdp_config $SHARDS
