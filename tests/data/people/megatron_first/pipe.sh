#!/bin/bash
# names that Megatron-LM had before 2.0, which DeepSpeed's examples still have
parts=2
stages=2
config="$(dirname $0)/ds.json"
options="--model-parallel-size $parts --pipe-parallel-size $stages --num-layers 24 --hidden-size 1024 \
    --num-attention-heads 16 --seq-length 1024 --max-position-embeddings 1024 --batch-size 4 --gas 8"
run="deepspeed --num_nodes 1 --num_gpus 8 pretrain_gpt2.py $options --fp16 --checkpoint-activations \
    --deepspeed --deepspeed_config $config"
echo $run
eval $run
