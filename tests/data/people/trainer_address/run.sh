#!/bin/bash
# the address is whatever the machine has; it says nothing of how many nodes there are
GPUS=4
torchrun --master_addr ${MASTER_ADDR} --nproc_per_node=${GPUS} --master_port=$PORT train.py \
    --model_name_or_path Qwen/Qwen2.5-1.5B-Instruct --bf16 True --per_device_train_batch_size 2 \
    --model_max_length 1024 --fsdp "full_shard auto_wrap" --fsdp_transformer_layer_cls_to_wrap Qwen2DecoderLayer
if [ $? -ne 0 ]; then
    exit 1
fi
