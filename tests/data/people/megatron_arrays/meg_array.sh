#!/bin/bash
#SBATCH -J gpt3-175b
#SBATCH -N 16
#SBATCH --ntasks-per-node=1
#SBATCH --gres=gpu:h100:8
#SBATCH --cpus-per-task=96
#SBATCH --array=1-10%1
set -euo pipefail
export CUDA_DEVICE_MAX_CONNECTIONS=1
GPUS_PER_NODE=${GPUS_PER_NODE:-8}
MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
MASTER_PORT=$((10000 + SLURM_JOB_ID % 20000))
NNODES=$SLURM_NNODES
TP=8
PP=${PP:-4}
DP=$((GPUS_PER_NODE*NNODES/TP/PP))
MBS=1
GBS=$((DP*MBS*64))
GPT_MODEL_ARGS=(
    --num-layers 96
    --hidden-size 12288
    --num-attention-heads 96
    --seq-length 2048
    --max-position-embeddings 2048
    --attention-backend auto # Can use (flash/fused/unfused/local)
)
TRAINING_ARGS=(
    --micro-batch-size $MBS
    --global-batch-size $GBS
    --rampup-batch-size 16 16 5859375
    --train-iters 500000
    --weight-decay 0.1
    --adam-beta1 0.9 --adam-beta2 0.95
    --init-method-std 0.006
    --clip-grad 1.0
    --bf16
    --lr 6.0e-5
    --lr-decay-style cosine
    --min-lr 6.0e-6
    --lr-warmup-fraction .001
    --lr-decay-iters 430000
)
MODEL_PARALLEL_ARGS=( --tensor-model-parallel-size $TP --pipeline-model-parallel-size $PP --num-layers-per-virtual-pipeline-stage 6 --sequence-parallel --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather )
DATA_ARGS=( --data-path $DATA --vocab-file vocab.json --merge-file merges.txt --split 949,50,1 )
EVAL_AND_LOGGING_ARGS=( --log-interval 100 --save-interval 10000 --eval-interval 1000 --save "$CKPT" --load "$CKPT" --eval-iters 10 --tensorboard-dir tb )
srun --label bash -c "torchrun --nproc_per_node $GPUS_PER_NODE --nnodes $NNODES --node_rank \$SLURM_PROCID --master_addr $MASTER_ADDR --master_port $MASTER_PORT pretrain_gpt.py ${GPT_MODEL_ARGS[*]} ${TRAINING_ARGS[*]} ${MODEL_PARALLEL_ARGS[*]} ${DATA_ARGS[*]} ${EVAL_AND_LOGGING_ARGS[*]}" 2>&1 | tee logs/$SLURM_JOB_ID.log
