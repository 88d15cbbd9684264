#!/bin/bash
# Llama-2-7B with Megatron-DeepSpeed and ZeRO-3.
DS_CONFIG=deepspeed_zero3.json
ds_args="--deepspeed \
  --deepspeed_config=$DS_CONFIG \
  --deepspeed-activation-checkpointing"

model_args=" \
    --num-layers 32 --hidden-size 4096 --ffn-hidden-size 11008 --num-attention-heads 32 --num-key-value-heads 32 \
    --seq-length 4096 --max-position-embeddings 4096 --attention-dropout 0 --hidden-dropout 0 \
    --use-rotary-position-embeddings --untie-embeddings-and-output-weights --swiglu --normalization rmsnorm \
    --disable-bias-linear"

deepspeed --num_nodes 4 --num_gpus 8 pretrain_gpt.py \
    --tensor-model-parallel-size 1 --no-pipeline-parallel --zero-stage 3 \
    $model_args --micro-batch-size 2 --global-batch-size 128 --bf16 \
    --train-iters 250000 --lr 3.0e-4 --lr-decay-style cosine --log-interval 1 \
    --data-path $DATA_PATH --tokenizer-type GPTSentencePieceTokenizer \
    $ds_args
