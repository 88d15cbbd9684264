CUDA_VISIBLE_DEVICES=0,1,2,3 swift sft --model Qwen/Qwen3-8B --train_type lora --max_length 2048 --dataset own/x
