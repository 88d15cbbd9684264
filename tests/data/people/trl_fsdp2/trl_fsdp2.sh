accelerate launch \
    --config_file trl_fsdp2.yaml \
    trl/scripts/sft.py \
    --model_name_or_path Qwen/Qwen2.5-7B \
    --dataset_name trl-lib/Capybara \
    --learning_rate 2.0e-5 \
    --num_train_epochs 1 \
    --packing \
    --max_length 4096 \
    --per_device_train_batch_size 2 \
    --gradient_accumulation_steps 8 \
    --gradient_checkpointing \
    --attn_implementation kernels-community/flash-attn2 \
    --eos_token '<|im_end|>' \
    --bf16 \
    --output_dir out
