#!/bin/bash
BATCH=64
PASS=2
EXPERTS=1
NAME="gpt-$(date +%d)-${EXPERTS}"
config="ds_${NAME}.json"
sed "s/CONFIG_BATCH_SIZE/${BATCH}/" "template.json" \
    | sed "s/CONFIG_PASS/${PASS}/" | sed "s/CONFIG_STAGE/1/" > ${config}
options="--num-layers 24 --hidden-size 1024 --num-attention-heads 16 --seq-length 1024 --max-position-embeddings 1024 \
    --micro-batch-size ${PASS} --global-batch-size ${BATCH} --num-experts ${EXPERTS} --fp16"
run="deepspeed --num_nodes 2 --num_gpus 8 pretrain_gpt.py ${options} --deepspeed --deepspeed_config ${config} \
    --no-pipeline-parallel &> log/${NAME}.log"
eval ${run}
