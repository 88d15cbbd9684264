#!/bin/bash
#SBATCH -N4 -n32 --gpus-per-task=1
#SBATCH --time=1:00:00
export MASTER_ADDR=$(hostname)
srun python train.py --model_name_or_path meta-llama/Llama-2-7b-hf --per_device_train_batch_size 1 --bf16 --max_seq_length 4096 --fsdp "full_shard auto_wrap" --fsdp_config fsdp.json
