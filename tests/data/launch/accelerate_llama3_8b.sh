#!/bin/bash
# Llama-3-8B with the Trainer, under accelerate's FSDP.
accelerate launch --config_file accelerate_fsdp.yaml run_clm.py \
    --model_name_or_path meta-llama/Meta-Llama-3-8B \
    --dataset_name allenai/c4 \
    --block_size 4096 \
    --per_device_train_batch_size 1 \
    --gradient_accumulation_steps 4 \
    --attn_implementation flash_attention_2 \
    --bf16 true \
    --optim adamw_torch_fused \
    --learning_rate 3e-4 --lr_scheduler_type cosine --warmup_ratio 0.03 \
    --do_train --output_dir out --logging_steps 10 --save_strategy steps --save_steps 1000 --report_to none
