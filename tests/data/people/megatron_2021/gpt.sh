#!/bin/bash
LAYERS="--num-layers 24 --hidden-size 2048 --num-attention-heads 16"
LENGTH="--seq-length 1024 --max-position-embeddings 1024"
python -m torch.distributed.launch --nproc_per_node 8 --nnodes 2 pretrain_gpt.py $LAYERS $LENGTH \
    --tensor-model-parallel-size 4 --pipeline-model-parallel-size 2 --micro-batch-size 4 --global-batch-size 64 \
    --activations-checkpoint-method uniform --DDP-impl local --fp16
