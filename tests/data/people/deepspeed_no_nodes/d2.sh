deepspeed --num_gpus=8 finetune.py \
  --deepspeed ./ds_auto.json \
  --model_name_or_path meta-llama/Llama-2-13b-hf \
  --bf16 True --fp16 False \
  --per_device_train_batch_size 2 --gradient_accumulation_steps 1 \
  --gradient_checkpointing False \
  --model_max_length 2048 \
  --use_lora False
