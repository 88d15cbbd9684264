#!/usr/bin/env bash
# SBATCH-like header without effect
#SBATCH --nodes=2
#SBATCH --gpus-per-node=8
usage() { echo "usage: $0 size"; exit 1; }
SIZE=${1:-"7b"}
case $SIZE in
  7b) L=32; H=4096; F=11008; A=32; ;;
  13b) L=40; H=5120; F=13824; A=40 ;;
  *) usage ;;
esac
model_args() {
  local n=$1
  cat <<EOF
--num-layers $n --hidden-size $H --ffn-hidden-size $F --num-attention-heads $A
EOF
}
LAUNCH="python -u -m torch.distributed.run --nproc_per_node 8 --nnodes $SLURM_NNODES --rdzv_endpoint $MASTER_ADDR:$MASTER_PORT --rdzv_backend c10d --max_restarts 0 --tee 3"
CMD="pretrain_gpt.py \
  $(model_args $L) \
  --seq-length 4096 --max-position-embeddings 4096 --swiglu --normalization RMSNorm --disable-bias-linear --untie-embeddings-and-output-weights --position-embedding-type rope --no-position-embedding \
  --tokenizer-type Llama2Tokenizer --make-vocab-size-divisible-by 1 --vocab-size 32000 \
  --tensor-model-parallel-size 2 --micro-batch-size 2 --global-batch-size 128 --bf16 --transformer-impl transformer_engine --use-flash-attn --recompute-activations"
srun --jobid $SLURM_JOBID bash -c "$LAUNCH --node_rank \$SLURM_PROCID $CMD"
