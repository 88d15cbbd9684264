#!/bin/bash
# two cards, a small adapter
RANKS=2
NPROC_PER_NODE=$RANKS CUDA_VISIBLE_DEVICES=0,1 swift sft \
    --model Qwen/Qwen2.5-7B-Instruct \
    --tuner_type lora \
    --target_modules all-linear \
    --dataset own/answers#2000 \
    --max_length 2048 \
    --model_author somebody \
    --model_name helper
