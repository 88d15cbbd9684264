#!/bin/bash
set -x
HOSTFILE=/job/hostfile
NUM=${1:-8}
ARGS="
 --model_name_or_path ${MODEL:-mistralai/Mistral-7B-v0.1}
 --per_device_train_batch_size 4
 --gradient_accumulation_steps 4
 --bf16 true
 --max_seq_length 4096
 --deepspeed ds_auto.json
"
deepspeed --include localhost:0,1,2,3 --master_port 29501 train.py $ARGS > log.txt 2>&1 &
wait
