#!/bin/bash
GPUS=8
accelerate launch --mixed_precision bf16 --num_machines 1 --num_processes $GPUS --use_deepspeed \
    --deepspeed_config_file configs/stage3.conf \
    finetune.py --model_name_or_path meta-llama/Llama-2-7b-hf --max_seq_length 2048 \
    --per_device_train_batch_size 2 --gradient_accumulation_steps $((128 / GPUS / 2))
