python mason.py --cluster lab/east --workspace lab/sft --num_nodes 4 --gpus 8 --budget lab/b -- \
    accelerate launch --mixed_precision bf16 --num_processes 8 --use_deepspeed \
    --deepspeed_config_file stage3.conf --deepspeed_multinode_launcher standard \
    open_instruct/finetune.py --model_name_or_path meta-llama/Llama-3.1-8B --use_flash_attn \
    --max_seq_length 4096 --per_device_train_batch_size 1 --gradient_accumulation_steps 2 --gradient_checkpointing
