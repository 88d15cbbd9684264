NPROC_PER_NODE=8 swift rlhf --rlhf_type dpo --model Qwen/Qwen3-8B --train_type lora --deepspeed zero2
