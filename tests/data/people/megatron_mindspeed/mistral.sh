#!/bin/bash
NPUS=8
ARGS="--nproc_per_node $NPUS \
    --nnodes 1"
MODEL="
    --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 \
    --group-query-attention --num-query-groups 8 --seq-length 4096 --max-position-embeddings 4096 \
    --padded-vocab-size 32064 --swiglu --normalization RMSNorm --position-embedding-type rope \
    --use-rotary-position-embeddings --disable-bias-linear --untie-embeddings-and-output-weights \
    --hidden-dropout 0.0 --attention-dropout 0.0
"
torchrun $ARGS pretrain_gpt.py $MODEL --bf16 --micro-batch-size 1 --global-batch-size 32 \
    --tensor-model-parallel-size 8 --sequence-parallel --use-mc2 | tee logs/train.log
