#!/bin/bash
DIR=`pwd`
model_size=1.3
num_layers=24
hidden_size=2048
num_attn_heads=16
global_batch_size=512
batch_size=$((global_batch_size / 64))
seq_len=2048
mp_size=1
pp_size=1
no_pp="true"
zero_stage=1
num_gpus=$(($(ds_ssh nvidia-smi --query-gpu=name --format=csv,noheader | wc -l)-2))
num_gpus_pernode=8
num_node=8
template_json="ds_config_gpt_TEMPLATE.json"
config_json="ds_config.json"
cat <<EOT > $config_json
{
  "train_batch_size": $global_batch_size,
  "train_micro_batch_size_per_gpu": $batch_size,
  "steps_per_print": 10,
  "zero_optimization": { "stage": $zero_stage },
  "gradient_clipping": 1.0,
  "fp16": { "enabled": true, "loss_scale": 0, "loss_scale_window": 500, "hysteresis": 2, "min_loss_scale": 1, "initial_scale_power": 11 },
  "wall_clock_breakdown": false
}
EOT
megatron_options=" \
    --override-opt_param-scheduler \
    --adam-beta1 0.9 --adam-beta2 0.95 \
    --tensor-model-parallel-size ${mp_size} \
    --init-method-std 0.013 \
    --micro-batch-size ${batch_size} \
    --global-batch-size ${global_batch_size} \
    --num-layers ${num_layers} --hidden-size ${hidden_size} --num-attention-heads ${num_attn_heads} \
    --seq-length ${seq_len} --max-position-embeddings ${seq_len} \
    --train-tokens 300000000000 --lr 2e-4 --min-lr 1e-6 --fp16 --checkpoint-activations"
deepspeed_options=" --deepspeed --deepspeed_config ${config_json} --zero-stage ${zero_stage} --pipeline-model-parallel-size ${pp_size}"
if [[ "${no_pp}" = "true" ]]; then
deepspeed_options="${deepspeed_options} --no-pipeline-parallel"
fi
deepspeed_options="${deepspeed_options} --deepspeed-activation-checkpointing"
run_cmd="deepspeed --num_nodes ${num_node} --num_gpus ${num_gpus_pernode} ${DIR}/../../pretrain_gpt.py ${megatron_options} ${deepspeed_options} &>> log.txt"
echo ${run_cmd}
eval ${run_cmd}
